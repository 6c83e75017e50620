"""Defaults and checks for the environment `prompts`, which plays users' own rows and rewards."""

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
"""Defaults for the lengths of users' prompts and answers; `load_config` applies them unless the
policy is a small one made from scratch."""
_LR = {"trainer": {"lr": 1e-6}}
"""The learning rate for all weights of a pretrained model; an adapter has its own default."""


def on_prompts_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings merged into the defaults for pretrained models and own prompts."""
    trainer = tree.get("trainer")
    has_adapter = isinstance(trainer, Mapping) and trainer.get("lora") is not None
    return merged(PROMPTS_DEFAULTS, {} if has_adapter else _LR, tree)


def require_model(env: str, model: str, *, is_named: bool) -> None:
    """Raise UsageError if the user's prompts would train the starter policy by default."""
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
