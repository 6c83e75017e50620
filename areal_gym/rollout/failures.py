"""How many failed episodes a run may have before it is not worth going on.

A run that is broken is to stop soon; a server that is being restarted is not to cost the run. They
are told apart by time, not by number, for an outage fails everything in flight at once:

    nothing has ever come through       broken: stops as soon as the budget is spent
    failures among successes            counted; more than `max_rate` of the window stops the run
    nothing comes through any more      an outage: counts as an eighth of the window at most, what
                                        failed is played again after growing pauses, and after
                                        a minute the run stops
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from areal_gym.errors import FailureBudgetError
from areal_gym.types import StopReason

PATIENCE_S = 60.0
"""How long an outage may last. Servers load a model in less; people notice about then."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 10.0

_HINTS = {
    StopReason.ENV_ERROR: "look for the cause with: areal-gym check ENV",
    StopReason.REWARD_ERROR: "rewards are finite numbers: see what the environment divides by",
    StopReason.AGENT_ERROR: "play one episode by itself: areal-gym eval --env ENV eval.num_tasks=1",
    StopReason.ENGINE_ERROR: "is the engine alive, and the model the right one?",
    StopReason.SANDBOX_ERROR: "see which sandboxes there are: areal-gym list sandboxes",
    StopReason.WORKER_ERROR: "is it out of memory? play fewer at once with "
    "rollout.max_in_flight, or spread them over more cluster.rollout_workers",
    StopReason.TIMEOUT: "raise rollout.episode_timeout_s, or play fewer at once with "
    "rollout.max_in_flight",
}


class FailureBudget:
    """Watches the share of failures among the newest episodes.

    Args:
        max_rate: the share that is tolerated; 1 tolerates any, but no lasting outage.
        window: how many episodes are looked at. One failing server fails all episodes in flight:
            several times their number.
        clock: seconds.
    """

    def __init__(
        self, max_rate: float, *, window: int = 64, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_rate = max_rate
        self._recent: deque[StopReason] = deque(maxlen=window)
        self._window = window
        self._clock = clock
        self._last_error = ""
        self._has_succeeded = False
        self._num_in_a_row = 0
        self._failing_since = 0.0

    @property
    def is_outage(self) -> bool:
        """Whether nothing comes through any more, though it did before."""
        return self._has_succeeded and self._num_in_a_row > self._window // 8

    @property
    def pause_s(self) -> float:
        """How long to wait before anything that failed is tried again: half the outage so far."""
        if not self.is_outage:
            return 0.0
        outage_s = self._clock() - self._failing_since
        return min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, outage_s / 2))

    def record(self, stop_reason: StopReason, error: str | None = None) -> None:
        """Count one episode.

        Raises:
            FailureBudgetError: the budget is exhausted; says where it fails, and the last error.
        """
        if not stop_reason.is_failure:
            self._recent.append(stop_reason)
            self._has_succeeded = True
            self._num_in_a_row = 0
            return
        self._last_error = error or ""
        if self._num_in_a_row == 0:
            self._failing_since = self._clock()
        self._num_in_a_row += 1
        if not self.is_outage:
            self._recent.append(stop_reason)
            num_failed = sum(reason.is_failure for reason in self._recent)
            if num_failed > self._max_rate * self._window:
                raise FailureBudgetError(self.describe(), hints=self.hints())
        elif (outage_s := self._clock() - self._failing_since) > PATIENCE_S:
            raise FailureBudgetError(
                f"nothing has come through for {outage_s:.0f} s, {self._num_in_a_row} episodes in "
                f"a row; {self.describe()}",
                hints=self.hints(),
            )

    def describe(self) -> str:
        """The share of failures, the boundaries, the last error."""
        failures = Counter(reason for reason in self._recent if reason.is_failure)
        where = ", ".join(f"{count} {reason}" for reason, count in failures.most_common())
        return (
            f"{failures.total()} of the last {len(self._recent)} episodes failed ({where}); "
            f"the last error: {self._last_error}"
        )

    def hints(self) -> list[str]:
        """What to do about the most common failure."""
        failures = Counter(reason for reason in self._recent if reason.is_failure)
        return [_HINTS[reason] for reason, _ in failures.most_common(1) if reason in _HINTS]
