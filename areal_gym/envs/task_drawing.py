"""Draws the task of an episode without beginning an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.utils import seeding

from areal_gym.envs.base import TextEnv
from areal_gym.envs.judging import env_errors
from areal_gym.types import Task


async def draw_task(env: TextEnv, seed: int, options: Mapping[str, Any]) -> Task:
    """Return the task that `env.reset(seed=seed, options=options)` would begin with.

    Only the environment's `sample_task` is asked, with the generator that a reset would give it:
    no opening message is made, and an episode that is under way goes on. An environment that
    learns its task from elsewhere (`prepare`), or that overrides `reset`, is reset.

    Raises:
        UsageError: the options name no task.
        EnvError: the environment's own code failed.
    """
    if not draws_without_reset(env):
        await env.areset(seed=seed, options=options)
        return env.task
    before = env.np_random
    env.np_random, _ = seeding.np_random(seed)
    try:
        with env_errors(f"{type(env).__name__}.sample_task"):
            return env.sample_task(env.np_random, options)
    finally:
        env.np_random = before


def draws_without_reset(env: TextEnv) -> bool:
    """Return whether the environment's task is what `sample_task` returns, and nothing else."""
    has_own_reset = any(
        getattr(type(env), name) is not getattr(TextEnv, name) for name in ("reset", "areset")
    )
    return not env.prepares and not has_own_reset
