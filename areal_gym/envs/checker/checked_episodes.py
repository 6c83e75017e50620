"""Plays episodes with policies that see the environment itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_gym.envs.base import StepResult, TextEnv
from areal_gym.envs.checker.env_under_test import RuleViolation
from areal_gym.types import content_hash

Policy = Callable[[TextEnv], str]

_MAX_STEPS = 1_000


def best(env: TextEnv) -> str:
    """Return the gold action, or the action that does nothing where no gold policy is known."""
    return env.gold_action() if env.has_gold else env.noop_action()


def noop(env: TextEnv) -> str:
    """Return the action that does nothing."""
    return env.noop_action()


def play(
    env: TextEnv,
    policy: Policy,
    *,
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[StepResult]:
    """Play one episode with a policy that sees the environment itself, and return its steps."""
    env.reset(seed=seed, options=options)
    steps: list[StepResult] = []
    while not _is_over(steps):
        steps.append(env.step(policy(env)))
    return steps


async def play_async(env: TextEnv, policy: Policy, seed: int) -> list[StepResult]:
    """Play one episode among others, and release its resources."""
    await env.areset(seed=seed)
    steps: list[StepResult] = []
    while not _is_over(steps):
        steps.append(await env.astep(policy(env)))
    await env.aclose()
    return steps


def _is_over(steps: Sequence[StepResult]) -> bool:
    if len(steps) >= _MAX_STEPS:
        raise RuleViolation(f"an episode does not end within {_MAX_STEPS} steps")
    return bool(steps) and (steps[-1].terminated or steps[-1].truncated)


def total_reward(steps: Sequence[StepResult]) -> float:
    """Return the sum of the rewards."""
    return sum(step.reward for step in steps)


def digest(make: Callable[[], TextEnv], seeds: range) -> str:
    """Return a hash of everything that the best policy and the idle one see."""
    env = make()
    seen: list[Any] = []
    for seed in seeds:
        for policy in (best, noop):
            observation, info = env.reset(seed=seed)
            seen.append([observation, info, *play(env, policy, seed=seed)])
    env.close()
    return content_hash(json.loads(json.dumps(seen, default=repr)))
