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
        """Determine the arms, or raise ConfigError if there are none. Called once, at the start."""

    def choose(self, rng: random.Random) -> Mapping[str, Any]:
        """Return options for `env.reset`, without the split, as JSON values. Changes no state."""

    def observe(self, options: Mapping[str, Any], rewards_G: Sequence[float]) -> None:
        """Learn from the rewards of a group with these options, even if a filter rejected it."""

    def state(self) -> dict[str, Any]:
        """Return what was learned, as JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with what `state` returned. Called after `prepare`."""


@dataclass(slots=True)
class SuccessRateCurriculum:
    """Prefers tasks that are solved about half the time, from which the policy learns most.

    The variance of a binary reward is p (1 - p), where p is the success rate. An arm is chosen with
    a weight of 4 p (1 - p), p being its recent success rate, and of `explore` at least, because
    rates change while the policy learns. An untried arm counts as p = 1/2, so it has the largest
    weight.

    Raises:
        ConfigError: an argument is out of its range.
    """

    success_reward: float = 1.0
    """A member with at least this reward has succeeded."""
    explore: float = 0.1
    """The smallest weight of an arm; the largest is 1."""
    memory: float = 8.0
    """About how many of an arm's latest groups its success rate is taken over."""
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
        """Use the environment's difficulties as arms, else its tasks, else raise ConfigError."""
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
        """Draw arms uniformly until one is accepted, with its weight as the probability."""
        while True:
            arm = self._arms[rng.randrange(len(self._arms))]
            if rng.random() < self._weight(arm):
                return {self._option: arm}

    def observe(self, options: Mapping[str, Any], rewards_G: Sequence[float]) -> None:
        """Count the group's successes and failures."""
        arm = options[self._option]
        num_right = sum(reward >= self.success_reward - _TOLERANCE for reward in rewards_G)
        discount = 1 - 1 / self.memory
        right, wrong = self._outcomes.get(arm, (0.0, 0.0))
        num_wrong = len(rewards_G) - num_right
        self._outcomes[arm] = (discount * right + num_right, discount * wrong + num_wrong)

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
