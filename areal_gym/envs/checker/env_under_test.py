"""The environment under test, and the results of rules."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_gym.envs.base import TextEnv
from areal_gym.plugins import EnvSpec, registry


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
    """Numbers that the rule measured."""


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
    """Number of concurrent episodes."""
    entry_point: str | None
    """The place from which another process imports it; None if it cannot."""
    kwargs: Mapping[str, Any]

    def indexes(self, split: str) -> range:
        """Return the tasks of a split that rules play."""
        known = self.make().num_tasks(split)
        return range(self.num_tasks if known is None else min(self.num_tasks, known))

    def episodes(self) -> Iterator[tuple[TextEnv, dict[str, Any]]]:
        """Yield an environment and the options of its next episode, for the tasks of both
        splits."""
        env = self.make()
        for split in ("train", "test"):
            for index in self.indexes(split):
                yield env, {"split": split, "index": index}
        env.close()


Rule = Callable[[EnvUnderTest], str | None]
"""Raises `RuleViolation`; returns its measurements, if any. Its docstring is the rule's summary."""


def subject_of(
    env: str | type[TextEnv] | Callable[[], TextEnv],
    *,
    num_tasks: int,
    num_concurrent: int,
    kwargs: Mapping[str, Any],
) -> EnvUnderTest:
    """Return the subject of an id, a class or a function.

    Raises:
        UnknownIdError: there is no such environment.
    """
    entry_point = None
    make: Callable[[], TextEnv]
    if isinstance(env, str):
        env_id, spec = env, registry().get("envs", env).spec
        assert isinstance(spec, EnvSpec)
        entry_point = spec.entry_point
        kwargs = {**spec.kwargs, **kwargs}

        def make() -> TextEnv:
            made: TextEnv = registry().make("envs", env_id, **kwargs)
            return made
    else:
        cls = env
        if isinstance(cls, type) and "<locals>" not in cls.__qualname__:
            # What a script defines, nobody else can import.
            entry_point = (
                None if cls.__module__ == "__main__" else f"{cls.__module__}:{cls.__qualname__}"
            )

        def make() -> TextEnv:
            return cls(**kwargs)

    return EnvUnderTest(make, num_tasks, num_concurrent, entry_point, kwargs)
