"""What a live display asks for again and again: where the episodes are, in one line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from areal_gym.rollout.stats import RolloutStats

__all__ = ["Waiting"]

_WINDOW_S = 10.0


class Waiting:
    """Called from any thread; the pace is that of the last ten seconds.

    Args:
        stats: where the runner stands.
        batch_groups: how many groups a batch has.
        sandbox_calls: how many calls of sandboxes are not answered yet.
    """

    def __init__(
        self, stats: Callable[[], RolloutStats], batch_groups: int, sandbox_calls: Callable[[], int]
    ) -> None:
        self._stats = stats
        self._batch_groups = batch_groups
        self._sandbox_calls = sandbox_calls
        self._seen: deque[tuple[float, int]] = deque()

    def __call__(self) -> str:
        """One line for people."""
        stats = self._stats()
        in_sandbox = min(self._sandbox_calls(), stats.waiting_on_env)
        places = {
            "engine": stats.waiting_on_engine,
            "sandbox": in_sandbox,
            "environment": stats.waiting_on_env - in_sandbox,
            "agent": stats.waiting_on_agent,
        }
        waiting = ", ".join(f"{name} {count}" for name, count in places.items() if count > 0)
        parts = [
            f"{stats.episodes_in_flight} in flight" + (f": {waiting}" if waiting else ""),
            f"{stats.groups_ready} of {self._batch_groups} groups ready",
        ]
        if (pace := self._tokens_per_s(stats)) is not None:
            parts.append(f"{pace:,.0f} tok/s sampled")
        if num_rejected := sum(stats.num_groups_rejected.values()):
            parts.append(f"{num_rejected} groups rejected by filters")
        if num_failed := sum(stats.num_failures.values()):
            parts.append(f"{num_failed} failures")
        return "; ".join(parts)

    def _tokens_per_s(self, stats: RolloutStats) -> float | None:
        """Of episodes that have ended: what is in flight is not counted yet."""
        self._seen.append((stats.elapsed_s, stats.num_tokens))
        while len(self._seen) > 2 and stats.elapsed_s - self._seen[1][0] > _WINDOW_S:
            self._seen.popleft()
        elapsed_s, num_tokens = self._seen[0]
        if stats.elapsed_s - elapsed_s < 1.0:
            return None
        return (stats.num_tokens - num_tokens) / (stats.elapsed_s - elapsed_s)
