"""When to look for reference cycles: as often as a five-hundredth of the time allows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

_SHARE = 0.002
"""Of the time. With 0.01 the looks alone would be the p99 of an event loop's lag."""
_FEWEST, _MOST = 10_000, 2_000_000


def relax_garbage_collection() -> Callable[[], None]:
    """Look for reference cycles seldom, and never among what is loaded already.

    Episodes leave no cycles behind, but are many small objects while they last. To look through
    these again and again, as Python does, takes a fifth of an episode's time with 1,024 in flight,
    and one look at everything stops the event loop for a second or two with 10,000. So nothing is
    looked at until the objects are so many more than after the last look (see `next_look`). Where
    nothing piles up, that is never.

    Returns:
        What undoes it.
    """
    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()
    pace = _Pace()
    gc.callbacks.append(pace)

    def undo() -> None:
        gc.callbacks.remove(pace)
        gc.set_threshold(*threshold)
        gc.unfreeze()

    return undo


def next_look(num_more: int, look_s: float, since_s: float) -> int:
    """How many more objects there are to be before the next look.

    Args:
        num_more: how many more there were at the last one.
        look_s: how long it took.
        since_s: the time from the one before it to its own end.
    """
    is_dear = look_s > _SHARE * since_s
    return min(_MOST, 8 * num_more) if is_dear else max(_FEWEST, num_more // 2)


class _Pace:
    """Told of each look's begin and end; says when the next one is."""

    def __init__(self) -> None:
        self._begin_s = self._end_s = time.perf_counter()
        self._wait_for(_FEWEST)

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._begin_s = now_s
            return
        self._wait_for(next_look(self._num_more, now_s - self._begin_s, now_s - self._end_s))
        self._end_s = now_s

    def _wait_for(self, num_more: int) -> None:
        self._num_more = num_more
        # The ones are for older objects, which every other look takes in: cycles may have lived
        # for an episode before they became garbage.
        gc.set_threshold(num_more, 1, 1)
