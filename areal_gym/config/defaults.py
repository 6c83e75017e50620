"""Defaults that depend on other settings: on the objective, the algorithm and the policy.

    field defaults < STARTER_DEFAULTS, STARTER_DEFAULTS_OF < objective, algorithm < file < flags,
    key=value

`fill_in` applies them to a tree of plain values, before validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from areal_gym.config.algorithm_settings import PRESETS
from areal_gym.config.objective_settings import OBJECTIVES
from areal_gym.config.online_settings import ONLINE
from areal_gym.config.settings_model import merged
from areal_gym.errors import choices

RENAMED = {"expert_ranks": "parallel.expert"}
"""Former names of settings below `trainer`, with their current names."""

STARTER_DEFAULTS: Mapping[str, Any] = {
    "engine": {"max_context": 256},
    "trainer": {"optimizer": "muon", "lr": 3e-4, "muon_lr": 3e-3, "vision": "full"},
    "steps": 60,
}
"""Defaults for the small policy that `engine.model=starter` builds; `load_config` applies them."""

STARTER_DEFAULTS_OF: Mapping[str, Mapping[str, Any]] = {
    "shapes": {
        "rollout": {
            "group_size": 16,
            "batch_groups": 12,
            "max_in_flight": 192,
            "max_staleness": 1,
        },
        "trainer": {"lr": 6e-4, "muon_lr": 6e-3, "lr_schedule": {"id": "linear"}},
        "eval": {"num_tasks": 256},
        "steps": 90,
    },
}
"""Further ones by environment. An answer in `shapes` is one token, of which a batch needs many; a
rate that falls to zero averages over their noise at the end. Training on pictures takes as long as
sampling, and one version of staleness lets both go on at once."""

_STARTER_LORA = {"optimizer": "adamw", "lr": 3e-3, "vision": "frozen"}
"""The trainer's defaults if the starter policy has an adapter, for which Muon is not suitable, and
which only the language model has."""

_UNCLIPPED = {"clip_low": None, "clip_high": None}
_DISTILLATION = PRESETS["grpo"].trainer() | {"advantage": "distill", **_UNCLIPPED}

# The preset's settings that apply only to its own estimator or loss.
_BELONG_TO = {"advantage": ("advantage_kwargs",), "loss": ("loss_kwargs", "clip_low", "clip_high")}
_PARTS = ("aggregation", "correction", "kl", "reward", *sum(_BELONG_TO.values(), ()))


def on_starter_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings merged into the defaults for the starter policy."""
    trainer, env = tree.get("trainer"), tree.get("env")
    has_adapter = isinstance(trainer, Mapping) and trainer.get("lora") is not None
    env_id = env.get("id") if isinstance(env, Mapping) else None
    own_defaults = STARTER_DEFAULTS_OF.get(str(env_id), {})
    adapter_defaults = {"trainer": _STARTER_LORA} if has_adapter else {}
    # Deterministic runs are synchronous.
    run_defaults = {"rollout": {"max_staleness": 0}} if tree.get("deterministic") else {}
    return merged(STARTER_DEFAULTS, own_defaults, adapter_defaults, run_defaults, tree)


def fill_in(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings merged into the defaults of their objective and algorithm.

    Sections that are not mappings stay as they are; validation reports them.

    Raises:
        ValueError: the objective or the algorithm is unknown.
    """
    objective = str(tree.get("objective", "rl"))
    if objective not in OBJECTIVES:
        raise ValueError(f"no objective {objective!r}: {choices(objective, OBJECTIVES)[0]}")
    sections = ("env", "agent", "trainer", "rollout")
    env, agent, trainer, rollout = (tree.get(section, {}) for section in sections)
    filled = dict(tree)
    if isinstance(trainer, Mapping):
        own_defaults = _distillation(tree.get("teacher")) if objective == "distill" else {}
        filled["trainer"] = fill_in_trainer(merged(own_defaults, trainer))
    if isinstance(env, Mapping) and env.get("id") == ONLINE and isinstance(agent, Mapping):
        filled["agent"] = {"id": ONLINE, **agent}
    algorithm = _algorithm_of(trainer)
    if isinstance(rollout, BaseModel):
        rollout = rollout.model_dump(exclude_unset=True)
    if algorithm in PRESETS and isinstance(rollout, Mapping):
        filled["rollout"] = {"filters": PRESETS[algorithm].filters, **rollout}
    return filled


def _distillation(teacher: object) -> dict[str, Any]:
    """Return the trainer's defaults for the objective "distill"."""
    if isinstance(teacher, Mapping):
        divergence = teacher.get("divergence", "sampled")
    else:
        divergence = getattr(teacher, "divergence", "sampled")
    own = {} if divergence == "sampled" else {"advantage": "reinforce"}
    return _DISTILLATION | own


def fill_in_trainer(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings below `trainer` merged into those of their algorithm's preset.

    Raises:
        ValueError: the algorithm is unknown.
    """
    trainer = with_new_names(trainer)
    algorithm = _algorithm_of(trainer) or "grpo"
    if algorithm not in PRESETS:
        raise ValueError(f"no algorithm {algorithm!r}: {choices(algorithm, PRESETS)[0]}")
    preset = PRESETS[algorithm].trainer()
    for part, settings in _BELONG_TO.items():
        if trainer.get(part, preset[part]) != preset[part]:
            for key in settings:
                preset.pop(key, None)
    return merged(preset, trainer)


def with_new_names(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings below `trainer` with former names replaced by the current ones."""
    rest = dict(trainer)
    for old, new in RENAMED.items():
        if old not in rest:
            continue
        value, (section, key) = rest.pop(old), new.split(".")
        settings = rest.get(section, {})
        if isinstance(settings, BaseModel):
            settings = settings.model_dump(exclude_unset=True)
        rest = merged(rest, {section: {key: value, **settings}})
    return rest


def without_defaults(trainer: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return `trainer` without the values that its algorithm fills in; reverts `fill_in_trainer`.

    `resolved` are the complete settings for the same algorithm, estimator and loss.
    """
    preset = PRESETS[resolved["algorithm"]]
    usual = {key: resolved[key] for key in _PARTS}
    return _without(trainer, usual | {"advantage": preset.advantage, "loss": preset.loss})


def _without(tree: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    rest: dict[str, Any] = {}
    for key, value in tree.items():
        if key in usual and value == usual[key]:
            continue
        is_section = isinstance(value, Mapping) and isinstance(usual.get(key), Mapping)
        rest[key] = _without(value, usual[key]) if is_section else value
    return rest


def _algorithm_of(trainer: object) -> str:
    if isinstance(trainer, Mapping):
        return str(trainer.get("algorithm", ""))
    return str(getattr(trainer, "algorithm", ""))
