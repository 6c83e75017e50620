"""What `train` and `eval` share: flags to settings, and the resolved settings to text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from areal_gym.config import RunConfig, load_config
from areal_gym.config.algorithm_settings import PRESETS
from areal_gym.config.objective_settings import OBJECTIVES, SUPERVISED
from areal_gym.config.trust import require_chosen
from areal_gym.errors import NothingToDoError, UsageError
from areal_gym.run_dir.provenance import entries_used
from areal_gym.run_dir.run_list import no_run_hints


def resolve(
    *,
    file: Path | None,
    overrides: Sequence[str],
    is_chosen: bool = True,
    **flags: Any,
) -> RunConfig:
    """Settings from the recipe, then the flags that were given, then `key=value`.

    Args:
        file: the recipe.
        overrides: `key=value` texts; they win.
        is_chosen: whether the user has named the file as a recipe; else it is that of a run
            directory, whose settings may not start programs (`areal_gym.config.trust`).
        flags: values by dotted key, with "__" for the dot; None was not given.

    Raises:
        ConfigError: a setting is unknown or wrong.
        UnknownIdError: an id is.
        UsageError: a run's settings would start a program that the user has not chosen.
    """
    given = [
        f"{key.replace('__', '.')}={json.dumps(value, ensure_ascii=False)}"
        for key, value in flags.items()
        if value is not None
    ]
    config = load_config(file, [*given, *overrides])
    if file is not None and not is_chosen:
        require_chosen(config, file, [text.partition("=")[0] for text in (*given, *overrides)])
    entries_used(config)
    return config


def env_flags(env: Sequence[str]) -> dict[str, Any]:
    """Flags for `resolve` of what `--env` says: one id, or several with weights (`tir:0.7`).

    Raises:
        UsageError: a weight without another environment to weigh it against.
    """
    chosen = [_weighed(text) for text in env]
    if len(chosen) < 2:
        if chosen and "weight" in chosen[0]:
            raise UsageError(
                f"--env {env[0]} is one environment with a weight",
                hints=["name another one: --env tir:0.7 --env math:0.3"],
            )
        return {"env__id": chosen[0]["id"] if chosen else None}
    return {"env__id": "mix", "env__kwargs": {"envs": chosen}}


def _weighed(text: str) -> dict[str, Any]:
    id, _, weight = text.rpartition(":")
    if "://" in id and ":" not in id.partition("://")[2]:  # a port: remote:http://HOST:PORT
        return {"id": text}
    try:
        return {"id": id, "weight": float(weight)} if id else {"id": text}
    except ValueError:  # of an adapter: reasoning_gym:leg_counting
        return {"id": text}


def require_env(env: Sequence[str], file: Path | None, overrides: Sequence[str]) -> None:
    """Refuse to guess which environment is meant.

    Raises:
        UsageError: neither flag, recipe nor override names one.
    """
    if not env and file is None and not any(o.startswith("env.id=") for o in overrides):
        raise UsageError(
            "which environment?",
            hints=["name one: --env tir", "all of them: areal-gym list envs"],
        )


def to_yaml(config: RunConfig) -> str:
    """The settings as a recipe that gives them again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def describe(config: RunConfig) -> str:
    """What one step and the run amount to, and who provides the parts."""
    from areal_gym.runs.memory_plan import describe_memory

    lines = _describe_supervised(config) if config.objective in SUPERVISED else _describe_rl(config)
    lines += describe_memory(config)
    if config.objective != "rl":
        lines.insert(0, f"objective: {config.objective}: {OBJECTIVES[config.objective]}")
    lines += [
        f"{entry.spec.kind}: {entry.id}, from {entry.plugin.source}"
        for entry in entries_used(config)
    ]
    return "\n".join(lines)


def _describe_supervised(config: RunConfig) -> list[str]:
    data = config.data
    source = data.file or (
        f"{data.num_examples:,} examples made by the demonstrators of {config.env.id}"
    )
    return [
        f"per step: {data.batch_size} examples, micro-batches of "
        f"{config.trainer.tokens_per_microbatch:,} tokens; 1 optimizer update",
        f"the run:  {config.steps} steps = {config.steps * data.batch_size:,} examples, from "
        f"{source}",
    ]


def _describe_rl(config: RunConfig) -> list[str]:
    rollout, trainer = config.rollout, config.trainer
    num_trajectories = rollout.batch_groups * rollout.group_size
    most_tokens = num_trajectories * config.engine.max_context
    num_microbatches = math.ceil(most_tokens / trainer.tokens_per_microbatch)
    updates = f"{trainer.minibatches} optimizer update{'s' * (trainer.minibatches > 1)}"
    return [
        f"per step: {rollout.batch_groups} groups x {rollout.group_size} = {num_trajectories} "
        f"trajectories, at most {most_tokens:,} tokens = {num_microbatches} micro-batches of "
        f"{trainer.tokens_per_microbatch:,}; {updates}",
        f"the run:  {config.steps} steps = {config.steps * num_trajectories:,} trajectories; "
        f"{rollout.max_in_flight} in flight, staleness at most {rollout.max_staleness}",
        f"algorithm: {trainer.algorithm}, {PRESETS[trainer.algorithm].summary}",
    ]


def existing(file: Path, complaint: str) -> Path:
    """The file, where it is; else UsageError with `complaint`."""
    if not file.is_file():
        message = f"{complaint}: there is no {file.name} in it"
        raise UsageError(message, hints=no_run_hints(file.parent))
    return file


def newest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run's directory.

    Raises:
        NothingToDoError: it has none yet.
    """
    steps = sorted((run / "checkpoints").glob("step-*/config.json"))
    if not steps:
        raise NothingToDoError(
            f"{run} has no checkpoint yet",
            hints=[f"continue it: areal-gym train --resume --out {run}"],
        )
    return steps[-1].parent
