"""Complete groups that wait for the trainer."""

from __future__ import annotations

import heapq

from areal_gym.rollout.staleness import is_fresh
from areal_gym.types import Group

__all__ = ["GroupBuffer"]


class GroupBuffer:
    """First started, first out.

    Not first *finished*: slow groups would always come last, and be dropped as too old, so that
    the policy would be trained on quick episodes only. It also makes batches reproducible.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, Group]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def indices(self) -> list[int]:
        """Which groups are here, ascending."""
        return sorted(index for index, _ in self._heap)

    def put(self, index: int, group: Group) -> None:
        """Add the group that was started as number `index`."""
        heapq.heappush(self._heap, (index, group))

    def take(self, num_groups: int) -> list[Group]:
        """Remove and return the `num_groups` that were started first, in order."""
        return [heapq.heappop(self._heap)[1] for _ in range(num_groups)]

    def drop_stale(self, version: int, max_staleness: int) -> list[Group]:
        """Remove and return the groups that are too old to be trained on under `version`."""
        stale = [group for _, group in self._heap if not is_fresh(group, version, max_staleness)]
        if stale:
            self._heap = [
                (index, group)
                for index, group in self._heap
                if is_fresh(group, version, max_staleness)
            ]
            heapq.heapify(self._heap)
        return stale
