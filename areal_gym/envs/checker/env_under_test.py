"""The environment under test, its episodes with policies that see it, and the rules' results."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from areal_gym.envs.base import StepResult, TextEnv
from areal_gym.envs.mcp_tools.env_with_servers import make_for_rules
from areal_gym.plugins import EnvSpec, registry
from areal_gym.types import content_hash


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleResult:
    """One rule of the contract, and whether the environment keeps it."""

    rule: str
    summary: str
    """The rule in a sentence."""
    is_ok: bool
    reason: str = ""
    """The reason for the failure, or for skipping the rule."""
    measured: str = ""


class RuleViolation(Exception):
    """A rule is broken; the text says how."""


def describe_error(error: Exception) -> str:
    """Return an error in one line, with the place where it was raised."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


class Skipped(Exception):
    """A rule cannot be checked here; the text says why."""


@dataclass(frozen=True, slots=True)
class EnvUnderTest:
    """The environment under test, and the size of the check."""

    make: Callable[[], TextEnv]
    num_tasks: int
    """Number of tasks that each rule plays."""
    num_concurrent: int
    entry_point: str | None
    """The place from which another process imports it; None if it cannot."""
    kwargs: Mapping[str, Any]

    def indexes(self, split: str) -> range:
        """Return the tasks of a split that rules play."""
        known = self.make().num_tasks(split)
        return range(self.num_tasks if known is None else min(self.num_tasks, known))

    def episodes(self) -> Iterator[tuple[TextEnv, dict[str, Any]]]:
        """Yield an environment and its next episode's options, for the tasks of both splits."""
        env = self.make()
        for split in ("train", "test"):
            for index in self.indexes(split):
                yield env, {"split": split, "index": index}
        env.close()


Rule = Callable[[EnvUnderTest], str | None]
"""Raises `RuleViolation`; returns its measurements, if any. Its docstring is the rule's summary."""


def subject_of(
    env: str | type[TextEnv] | Callable[[], TextEnv], kwargs: Mapping[str, Any], **sizes: int
) -> EnvUnderTest:
    """Return the subject of an id, a class or a function; raise UnknownIdError for unknown ids."""
    entry_point = None
    if isinstance(env, str):
        spec = registry().get("envs", env).spec
        assert isinstance(spec, EnvSpec)
        entry_point = spec.entry_point
        kwargs = {**spec.kwargs, **kwargs}
        if kwargs.get("mcp_servers"):
            return _with_servers({"entry_point": entry_point, **kwargs}, sizes)
    elif isinstance(env, type):
        # What a script or a function defines, no other process can import.
        is_importable = env.__module__ != "__main__" and "<locals>" not in env.__qualname__
        entry_point = f"{env.__module__}:{env.__qualname__}" if is_importable else None

    def make() -> TextEnv:
        made = registry().make("envs", env, **kwargs) if isinstance(env, str) else env(**kwargs)
        return cast(TextEnv, made)

    return EnvUnderTest(make=make, entry_point=entry_point, kwargs=kwargs, **sizes)


def _with_servers(kwargs: Mapping[str, Any], sizes: Mapping[str, int]) -> EnvUnderTest:
    """Return the subject of an environment with MCP servers, which serve all of its episodes.

    Rules play thousands of short episodes; the rule `mcp_servers` starts servers of its own.
    """
    entry_point = f"{make_for_rules.__module__}:{make_for_rules.__name__}"
    make = partial(make_for_rules, **kwargs)
    return EnvUnderTest(make=make, entry_point=entry_point, kwargs=kwargs, **sizes)


# ---- episodes ------------------------------------------------------------------------------------

Policy = Callable[[TextEnv], str]


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
    if len(steps) >= 1_000:
        raise RuleViolation(f"an episode does not end within {len(steps):,} steps")
    return bool(steps) and (steps[-1].terminated or steps[-1].truncated)


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
