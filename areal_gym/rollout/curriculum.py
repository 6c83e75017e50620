"""Curricula choose the next task from the results of earlier ones.

A curriculum chooses among *arms*. An environment offers them in one of two ways:

    difficulties = (1, 2, 3)        its `reset` takes options={"difficulty": 2}
    num_tasks("train") -> 500       its `reset` takes options={"index": 17}

A curriculum is a class; a run's settings name its keyword arguments.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_gym.envs.base import TextEnv
from areal_gym.errors import ConfigError
from areal_gym.tasks import TaskSource

_TOLERANCE = 1e-9


class Curriculum(Protocol):
    """Chooses the reset options of groups, and learns from their rewards.

    The choice depends on the generator and on what was observed only, so that an interrupted run
    continues as if it had not been interrupted.
    """

    def prepare(self, env: TextEnv, split: str) -> None:
        """Find out what to choose from, or raise ConfigError. Called once, before anything else."""

    def choose(self, rng: random.Random) -> Mapping[str, Any]:
        """Return options for `env.reset`, fit for JSON, besides the split. Changes no state."""

    def observe(self, options: Mapping[str, Any], rewards_G: Sequence[float]) -> None:
        """Learn from the rewards of a group with these options; filters do not matter."""

    def state(self) -> dict[str, Any]:
        """Return what was learned, fit for JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state` returned. Called after `prepare`."""


@dataclass(slots=True)
class SuccessRateCurriculum:
    """Prefers tasks that succeed about half the time: the others teach little (p (1 - p)).

    An arm is chosen in proportion to 4 p (1 - p), where p is its recent success rate, and never
    in less than `explore`: rates change while the policy learns. An unknown rate counts as one
    half, so that every arm is tried first.

    Raises:
        ConfigError: an argument is out of its range.
    """

    success_reward: float = 1.0
    """The reward from which on a member has succeeded."""
    explore: float = 0.1
    """The least weight of an arm; the best arm has 1."""
    memory: float = 8.0
    """About how many groups of an arm count."""
    _option: str = field(default="", init=False)
    _arms: Sequence[Any] = field(default=(), init=False)
    _outcomes: dict[Any, tuple[float, float]] = field(default_factory=dict, init=False)
    """Successes and failures per arm; older groups are discounted."""

    def __post_init__(self) -> None:
        if not 0 < self.explore <= 1:
            raise ConfigError(
                f"curriculum success-rate: explore = {self.explore:g} is not between 0 and 1"
            )
        if self.memory < 1:
            raise ConfigError(f"curriculum success-rate: memory = {self.memory:g} is below 1 group")

    def prepare(self, env: TextEnv | TaskSource, split: str) -> None:
        """Choose among difficulties if there are any, else among tasks; or raise ConfigError."""
        if difficulties := getattr(env, "difficulties", ()):
            self._option, self._arms = "difficulty", difficulties
            return
        num_tasks = env.num_tasks(split)
        if not num_tasks:
            raise ConfigError(
                f"{type(env).__name__} leaves a curriculum nothing to choose: it has no "
                f"`difficulties`, and no end of tasks in split {split!r}",
                hints=[
                    "leave the curriculum out: rollout.curriculum=null",
                    "or give the environment levels: a sequence `difficulties`, and "
                    'options["difficulty"] in sample_task',
                ],
            )
        self._option, self._arms = "index", range(num_tasks)

    def choose(self, rng: random.Random) -> Mapping[str, Any]:
        """Draw arms evenly until one is accepted, with its weight as the probability."""
        while True:
            arm = self._arms[rng.randrange(len(self._arms))]
            if rng.random() < self._weight(arm):
                return {self._option: arm}

    def observe(self, options: Mapping[str, Any], rewards_G: Sequence[float]) -> None:
        """Count the group's successes and failures."""
        arm = options[self._option]
        num_right = sum(reward >= self.success_reward - _TOLERANCE for reward in rewards_G)
        kept = 1 - 1 / self.memory
        right, wrong = self._outcomes.get(arm, (0.0, 0.0))
        self._outcomes[arm] = (kept * right + num_right, kept * wrong + len(rewards_G) - num_right)

    def success_rate(self, arm: Any) -> float:
        """Return the recent success rate of an arm; one half while little is known."""
        right, wrong = self._outcomes.get(arm, (0.0, 0.0))
        return (right + 1) / (right + wrong + 2)

    def state(self) -> dict[str, Any]:
        """Return the outcomes of the arms that were tried."""
        return {"outcomes": [[arm, *counts] for arm, counts in self._outcomes.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with these outcomes."""
        self._outcomes = {arm: (right, wrong) for arm, right, wrong in state["outcomes"]}

    def _weight(self, arm: Any) -> float:
        rate = self.success_rate(arm)
        return max(self.explore, 4 * rate * (1 - rate))
