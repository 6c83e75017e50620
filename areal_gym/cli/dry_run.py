"""`areal-gym train --dry-run`: the resolved settings, and what one step amounts to."""

from __future__ import annotations

import math

import yaml

from areal_gym.config import RunConfig
from areal_gym.config.algorithm_settings import PRESETS
from areal_gym.config.objective_settings import OBJECTIVES, SUPERVISED
from areal_gym.run_dir.provenance import entries_used


def to_yaml(config: RunConfig) -> str:
    """Return the settings as a recipe that resolves to the same settings."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def describe(config: RunConfig) -> str:
    """Describe the size of a step and of the run, and the plugins that provide its parts."""
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
        f"{data.num_examples:,} examples from the demonstrators of {config.env.id}"
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
