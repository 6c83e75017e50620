"""Make Python's garbage collector run less often: in programs of ours, and in runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

_MAX_TIME_SHARE = 0.002
"""The share of time that collections may take. A share of 0.01 would determine the p99 lag."""
_FEWEST, _MOST = 10_000, 2_000_000
"""Bounds of the number of new objects between two collections."""


def collect_rarely() -> None:
    """Let the garbage collector of this process run after 100,000 new objects instead of 700.

    For programs of ours, before their imports: torch and transformers consist of a million
    objects, none of which is garbage, and an eighth of the time went into looking for some.
    """
    gc.set_threshold(100_000, 20, 20)


def relax_garbage_collection() -> Callable[[], None]:
    """Limit garbage collection to 0.2% of the time, and exclude objects that exist now.

    Episodes consist of many small objects, but leave no reference cycles. With 1,024 episodes in
    flight, Python's default settings take a fifth of the time. A fixed threshold does not help:
    with 3,000 in flight, 10,000 new objects between collections gave an event-loop lag of 48 ms
    (p99), 100,000 gave 240 ms, and this function gives 7 ms (`benchmarks/scale.py`).

    Returns:
        A function that restores the settings. Where the application had frozen its own objects
        before (`gc.freeze`), everything stays frozen, because Python can only unfreeze all.
    """
    threshold = gc.get_threshold()
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    pace = _Pace()
    gc.callbacks.append(pace)

    def undo() -> None:
        gc.callbacks.remove(pace)
        gc.set_threshold(*threshold)
        if not was_frozen:
            gc.unfreeze()

    return undo


def next_threshold(threshold: int, collection_s: float, interval_s: float) -> int:
    """Return the number of new objects after which the next collection starts.

    Args:
        threshold: the same number before the last collection.
        collection_s: the time that the last collection took.
        interval_s: the time between the ends of the last two collections.
    """
    if collection_s > _MAX_TIME_SHARE * interval_s:
        return min(_MOST, 8 * threshold)
    return max(_FEWEST, threshold // 2)


class _Pace:
    def __init__(self) -> None:
        self._begin_s = self._end_s = time.perf_counter()
        self._set_threshold(_FEWEST)

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._begin_s = now_s
            return
        self._set_threshold(
            next_threshold(self._threshold, now_s - self._begin_s, now_s - self._end_s)
        )
        self._end_s = now_s

    def _set_threshold(self, threshold: int) -> None:
        self._threshold = threshold
        # Every other collection covers older objects: cycles may have lived for an episode.
        gc.set_threshold(threshold, 1, 1)
