"""Complete groups that wait for the trainer."""

from __future__ import annotations

import heapq
import time
from operator import itemgetter

from areal_gym.rollout.staleness import is_fresh
from areal_gym.types import Group


class GroupBuffer:
    """First started, first out.

    Not first *finished*: slow groups would always come last, and be dropped as too old, so that
    the policy would be trained on quick episodes only. It also makes batches reproducible.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int | None, Group]] = []
        """Number, since when it is here, the oldest version in it, and the group."""

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def indices(self) -> list[int]:
        """Which groups are here, ascending."""
        return sorted(entry[0] for entry in self._heap)

    @property
    def oldest_s(self) -> float:
        """How long the group that would be taken next has been here; 0 when there is none."""
        return time.monotonic() - self._heap[0][1] if self._heap else 0.0

    def put(self, index: int, group: Group) -> None:
        """Add the group that was started as number `index`."""
        # The trainer's door is asked at the end of every episode, and tokens do not grow younger.
        heapq.heappush(self._heap, (index, time.monotonic(), group.oldest_version, group))

    def take(self, num_groups: int) -> dict[int, Group]:
        """Remove and return the `num_groups` that were started first, in order."""
        taken = [heapq.heappop(self._heap) for _ in range(num_groups)]
        return {index: group for index, _, _, group in taken}

    def take_after(self, since: int) -> dict[int, Group]:
        """Remove and return the groups that were started after number `since`, in order."""
        taken = {
            index: group
            for index, _, _, group in sorted(self._heap, key=itemgetter(0))
            if index > since
        }
        if taken:
            self._heap = [entry for entry in self._heap if entry[0] not in taken]
            heapq.heapify(self._heap)
        return taken

    def drop_stale(self, version: int, max_staleness: int) -> dict[int, Group]:
        """Remove and return the groups that are too old to be trained on under `version`."""
        stale = {
            index: group
            for index, _, oldest, group in self._heap
            if not is_fresh(oldest, version, max_staleness)
        }
        if stale:
            self._heap = [entry for entry in self._heap if entry[0] not in stale]
            heapq.heapify(self._heap)
        return stale
