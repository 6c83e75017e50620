"""Filters reject finished groups that are not worth training on.

A group whose members all have the same reward has no advantage, so it would waste its place in the
batch. The runner counts rejected groups, never trains on them, and starts others instead ("dynamic
sampling", DAPO, arXiv 2503.14476).

A filter is a class; a run's settings name its keyword arguments::

    class ShortOnly:
        def __init__(self, max_tokens: int = 100) -> None: ...
        def reject(self, group): return "too-long" if ... else None
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from areal_gym.episode_roles import groups_by_role
from areal_gym.errors import ConfigError
from areal_gym.types import Group

_TOLERANCE = 1e-9


class GroupFilter(Protocol):
    """Decides whether a group is trained on, by its content alone, so that runs are repeatable."""

    def reject(self, group: Group) -> str | None:
        """Return in one word why the group is rejected, or None to keep it.

        The word becomes part of a metric's name, so use few different ones.
        """


def rejection(filters: Mapping[str, GroupFilter], group: Group) -> str | None:
    """Return the first filter that rejects the group, as "filter/reason"; None if all keep it.

    In episodes of several roles, each role's trajectories form a group, and a filter rejects the
    episode's group only if it rejects the groups of all roles.
    """
    parts = groups_by_role(group)
    for id, group_filter in filters.items():
        reasons = [group_filter.reject(part) for part in parts]
        if None not in reasons:
            return f"{id}/{reasons[0]}"
    return None


class ZeroVarianceFilter:
    """Rejects groups whose members all have the same reward."""

    def reject(self, group: Group) -> str | None:
        """Return "all-equal" if all rewards are the same."""
        rewards_G = group.rewards_G
        return "all-equal" if max(rewards_G) - min(rewards_G) <= _TOLERANCE else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SuccessRateFilter:
    """Keeps groups whose success rate lies strictly between `low` and `high`.

    The defaults keep groups that some, but not all, members solve.

    Raises:
        ConfigError: the band is empty, or not inside 0 to 1.
    """

    low: float = 0.0
    high: float = 1.0
    success_reward: float = 1.0
    """A member with at least this reward has succeeded."""

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ConfigError(
                f"success-rate keeps groups between low = {self.low:g} and high = {self.high:g}: "
                "no group could be",
                hints=["0 <= low < high <= 1, such as low=0.1 high=0.9"],
            )

    def reject(self, group: Group) -> str | None:
        """Return "too-hard" at `low` or below, "too-easy" at `high` or above."""
        rewards_G, least = group.rewards_G, self.success_reward - _TOLERANCE
        rate = sum(reward >= least for reward in rewards_G) / len(rewards_G)
        if rate <= self.low:
            return "too-hard"
        return "too-easy" if rate >= self.high else None
