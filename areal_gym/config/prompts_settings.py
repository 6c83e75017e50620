"""The environment `prompts`, of the user's own rows and rewards, and the defaults it implies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_gym.config.settings_model import merged
from areal_gym.errors import UsageError

PROMPTS = "prompts"
"""The id of the environment."""

PROMPTS_DEFAULTS: Mapping[str, Any] = {
    "engine": {"max_context": 2048},
    "rollout": {"max_new_tokens": 512},
}
"""Room for prompts and answers of people; `load_config` applies it unless a small policy is made
from scratch."""
_LR = {"trainer": {"lr": 1e-6}}
"""The learning rate for all weights of a pretrained model; an adapter has its own default."""


def on_prompts_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings on top of those that suit pretrained models and own prompts."""
    trainer = tree.get("trainer")
    has_adapter = isinstance(trainer, Mapping) and trainer.get("lora") is not None
    return merged(PROMPTS_DEFAULTS, {} if has_adapter else _LR, tree)


def require_model(env: str, model: str, *, is_named: bool) -> None:
    """Raise UsageError if own prompts would train a small policy that was not asked for."""
    if env == PROMPTS and model == "starter" and not is_named:
        raise UsageError(
            "which model answers your prompts?",
            hints=[
                "one of the hub, or a directory: --model Qwen/Qwen3-0.6B",
                "a small one, made from scratch, which first imitates the column 'answer': "
                "--model starter",
                "from Python: model='Qwen/Qwen3-0.6B'",
            ],
        )
