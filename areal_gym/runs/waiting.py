"""Shows what a run's episodes wait for, and says when the run waits for lost servers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from areal_gym.rollout.stats import RolloutStats
from areal_gym.utils.markup import counted

_WINDOW_S = 10.0
"""The pace of sampling is over this many seconds."""
_LOOK_S = 1.0
_SAY_EVERY_S = 30.0


@dataclass(slots=True)
class ProgressLine:
    """Returns a line about a run's episodes, on any thread."""

    stats: Callable[[], RolloutStats]
    batch_groups: int
    sandbox_calls: Callable[[], int]
    """Returns the number of unanswered sandbox calls."""
    _samples: deque[tuple[float, int]] = field(default_factory=deque)
    """(elapsed seconds, sampled tokens) at recent calls."""

    def __call__(self) -> str:
        """Return one line for people."""
        stats = self.stats()
        in_sandbox = min(self.sandbox_calls(), stats.waiting_on_env)
        places = {
            "engine": stats.waiting_on_engine,
            "sandbox": in_sandbox,
            "environment": stats.waiting_on_env - in_sandbox,
            "agent": stats.waiting_on_agent,
        }
        waiting = ", ".join(f"{name} {count}" for name, count in places.items() if count > 0)
        parts = [
            f"{stats.episodes_in_flight} in flight" + (f": {waiting}" if waiting else ""),
            f"{stats.groups_ready} of {self.batch_groups} groups ready",
        ]
        if (pace := self._tokens_per_s(stats)) is not None:
            parts.append(f"{pace:,.0f} tok/s sampled")
        if num_rejected := sum(stats.num_groups_rejected.values()):
            parts.append(f"{num_rejected} groups rejected by filters")
        if num_failed := sum(stats.num_failures.values()):
            parts.append(f"{num_failed} failures")
        if stats.outage_s > 0:
            parts.insert(0, _outage(stats))
        return "; ".join(parts)

    def _tokens_per_s(self, stats: RolloutStats) -> float | None:
        # Tokens of episodes that have ended; those in flight are not counted yet.
        self._samples.append((stats.elapsed_s, stats.num_tokens))
        while len(self._samples) > 2 and stats.elapsed_s - self._samples[1][0] > _WINDOW_S:
            self._samples.popleft()
        elapsed_s, num_tokens = self._samples[0]
        if stats.elapsed_s - elapsed_s < 1.0:
            return None
        return (stats.num_tokens - num_tokens) / (stats.elapsed_s - elapsed_s)


def _outage(stats: RolloutStats) -> str:
    return (
        "waiting for servers or workers, "
        f"{stats.outage_s:.0f} s of {stats.outage_patience_s:.0f} s; "
        f"{counted(stats.episodes_in_flight + stats.episodes_queued, 'episode')} to be played"
    )


@asynccontextmanager
async def saying_outages(
    stats: Callable[[], RolloutStats], say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Say, inside of the context, when an outage begins, continues and ends."""

    async def watch() -> None:
        longest_s = next_s = 0.0
        while True:
            await asyncio.sleep(_LOOK_S)
            now = stats()
            if now.outage_s == 0:
                if next_s > 0:
                    say(
                        f"servers or workers are back after {longest_s:.0f} s; "
                        "what was lost is played again"
                    )
                longest_s = next_s = 0.0
                continue
            longest_s = max(longest_s, now.outage_s)
            if now.outage_s >= next_s:
                say(_outage(now))
                next_s = now.outage_s + _SAY_EVERY_S

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
