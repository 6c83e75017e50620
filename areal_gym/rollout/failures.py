"""Decides what follows a failed episode: another attempt, a pause, or the end of the run.

A broken run should stop soon, but a server restart should not end the run. An outage fails all
episodes in flight at once, so the number of failures does not tell the two apart; time does:

    no episode has ever completed       broken: the run stops as soon as the budget is spent
    some episodes complete, some fail   failures are counted; the run stops if they are more than
                                        `max_rate` of the window
    episodes completed, now all fail    an outage: counts as an eighth of the window at most; failed
                                        episodes are retried after growing pauses; the run stops
                                        after a minute
    episodes are lost                   their server, worker or sandbox is gone: they are retried at
                                        no cost; the run stops after `outage_patience_s`
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from enum import Enum, auto

from areal_gym.config import RolloutConfig
from areal_gym.errors import FailureBudgetError
from areal_gym.types import StopReason, Trajectory

PATIENCE_S = 60.0
"""How many seconds all episodes may fail. Servers load a model in less."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 10.0
_WAVES = 4
"""The window of the failure budget is this many times the episodes in flight: one failing server
fails them all, and then the ones that are retried at once."""

_HINTS = {
    StopReason.ENV_ERROR: "look for the cause with: areal-gym check ENV, "
    "or areal-gym check --data DATA --reward REWARD",
    StopReason.REWARD_ERROR: "rewards, their parts and metrics are finite numbers: look at "
    "what the environment, or your reward function, returns",
    StopReason.TASK_ERROR: "look for the cause with: areal-gym check ENV",
    StopReason.AGENT_ERROR: "play one episode by itself: areal-gym eval --env ENV eval.num_tasks=1",
    StopReason.ENGINE_ERROR: "is the engine alive, and the model the right one?",
    StopReason.SANDBOX_ERROR: "see which sandboxes there are: areal-gym list sandboxes",
    StopReason.WORKER_ERROR: "is it out of memory? play fewer at once with "
    "rollout.max_in_flight, or spread them over more cluster.rollout_workers",
    StopReason.TIMEOUT: "raise rollout.episode_timeout_s, or play fewer at once with "
    "rollout.max_in_flight",
}
_INFRASTRUCTURE = {StopReason.ENGINE_ERROR, StopReason.SANDBOX_ERROR, StopReason.WORKER_ERROR}


def is_infrastructure_failure(trajectory: Trajectory) -> bool:
    """Return whether infrastructure failed, and neither the environment nor the agent."""
    return trajectory.is_lost or trajectory.stop_reason in _INFRASTRUCTURE


class Outcome(Enum):
    """The result of one attempt at an episode."""

    COMPLETED = auto()
    FAILED = auto()
    """The attempt failed, and may be repeated while retries are left."""
    LOST = auto()
    """An outage ended the attempt; it is repeated at no cost."""
    FINAL = auto()
    """The attempt failed and must not be repeated."""


class FailureBudget:
    """Watches the share of failures among the latest episodes: `max_rate` of `window` is tolerated.

    A rate of 1 tolerates all failures except a lasting outage. The window should be several times
    the episodes in flight, because one failing server fails them all.
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
        """Whether all episodes fail now, although some completed before."""
        return self._has_succeeded and self._num_in_a_row > self._window // 8

    @property
    def pause_s(self) -> float:
        """Seconds to wait before a failed episode is retried: half of the outage so far."""
        return _pause_s(self._clock() - self._failing_since) if self.is_outage else 0.0

    def record(self, stop_reason: StopReason, error: str | None = None) -> None:
        """Count one episode; raise FailureBudgetError when the budget is spent."""
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
                raise self.error()
        elif (outage_s := self._clock() - self._failing_since) > PATIENCE_S:
            raise self.error(
                f"no episode has completed for {outage_s:.0f} s, {self._num_in_a_row} failed in "
                "a row; "
            )

    def error(self, cause: str = "") -> FailureBudgetError:
        """Return an error that names the share of failures, their boundaries and the last error."""
        failures = Counter(reason for reason in self._recent if reason.is_failure).most_common()
        where = ", ".join(f"{count} {reason}" for reason, count in failures)
        return FailureBudgetError(
            f"{cause}{sum(count for _, count in failures)} of the last {len(self._recent)} "
            f"episodes failed ({where}); the last error: {self._last_error}",
            hints=[_HINTS.get(reason) for reason, _ in failures[:1]],
        )


class Outage:
    """Measures how long episodes have been lost, and ends the run when it is too long.

    Args:
        patience_s: the longest outage, in seconds.
        clock: returns the time in seconds.
        engine_outage_s: returns for how many seconds the engine has had no server; 0 if it has one.
        on_lost: called with (seconds of the outage, patience) when an episode is lost in one.
    """

    def __init__(
        self,
        patience_s: float,
        *,
        clock: Callable[[], float],
        engine_outage_s: Callable[[], float] = lambda: 0.0,
        on_lost: Callable[[float, float], None] | None = None,
    ) -> None:
        self.patience_s = patience_s
        self.last_error = ""
        self._clock = clock
        self._engine_outage_s = engine_outage_s
        self._on_lost = on_lost
        self._since_s: float | None = None
        self._hold_until_s = 0.0

    @property
    def seconds(self) -> float:
        """The duration of the current outage; 0 if there is none."""
        own_s = 0.0 if self._since_s is None else self._clock() - self._since_s
        return max(own_s, self._engine_outage_s())

    @property
    def hold_s(self) -> float:
        """Seconds until episodes may start again; 0 if they may start now."""
        return max(0.0, self._hold_until_s - self._clock())

    @property
    def pause_s(self) -> float:
        """Seconds to wait before a lost episode is retried: half of the outage so far."""
        return _pause_s(self.seconds)

    def hold(self, seconds: float) -> None:
        """Let no episode start for this many seconds."""
        self._hold_until_s = max(self._hold_until_s, self._clock() + seconds)

    def lost(self, error: str | None) -> None:
        """Record a lost episode; raise FailureBudgetError if the outage has lasted too long."""
        self.last_error = error or ""
        if self._since_s is None:
            self._since_s = self._clock()
        if self.seconds <= self.patience_s:
            if self._on_lost is not None:
                self._on_lost(self.seconds, self.patience_s)
            return
        raise FailureBudgetError(
            f"waited {self.seconds:.0f} s for servers to come back, and no episode completed; "
            f"rollout.outage_patience_s = {self.patience_s:g}; the last error: {self.last_error}",
            hints=[
                "restart what is gone, then continue with --resume: no group is lost",
                "wait for longer next time: rollout.outage_patience_s=SECONDS",
            ],
        )

    def end(self) -> None:
        """End the outage, because an episode has completed."""
        self._since_s = None
        self._hold_until_s = 0.0


class FailurePolicy:
    """Counts attempts at episodes, and decides whether they are repeated.

    Args:
        budget: counts failures.
        outage: measures how long episodes have been lost.
        max_retries: how often a failed episode is retried; lost ones do not count.
        waits: whether a failed episode is retried only after the budget's pause.
    """

    def __init__(
        self, budget: FailureBudget, outage: Outage, *, max_retries: int, waits: bool = True
    ) -> None:
        self.budget = budget
        self.outage = outage
        self.num_completed = 0
        self.num_failures: Counter[str] = Counter()
        """Failed attempts by stop reason."""
        self._max_retries = max_retries
        self._waits = waits

    @classmethod
    def for_training(
        cls, config: RolloutConfig, engine_outage_s: Callable[[], float]
    ) -> FailurePolicy:
        """Return the policy of a training run; see `Outage` for `engine_outage_s`."""
        window = max(64, _WAVES * config.max_in_flight)
        return cls(
            FailureBudget(config.max_failure_rate, window=window, clock=loop_time),
            Outage(config.outage_patience_s, clock=loop_time, engine_outage_s=engine_outage_s),
            max_retries=config.max_retries,
        )

    def record(self, trajectory: Trajectory) -> Outcome:
        """Count an attempt; raises what `record_failure` raises."""
        reason = trajectory.stop_reason
        if reason.is_failure:
            return self.record_failure(reason, trajectory.error, is_lost=trajectory.is_lost)
        self.budget.record(reason)
        self.outage.end()
        self.num_completed += 1
        return Outcome.COMPLETED

    def record_failure(self, reason: StopReason, error: str | None, *, is_lost: bool) -> Outcome:
        """Count a failed attempt; raise FailureBudgetError for too many, or a long outage."""
        self.num_failures[str(reason)] += 1
        # Workers that die before any episode has completed are killed by the episodes.
        is_broken = reason is StopReason.WORKER_ERROR and self.num_completed == 0
        if is_lost and not is_broken:
            self.outage.lost(error)
            return Outcome.LOST
        self.budget.record(reason, error)
        # Retrying an episode because of its reward would select by reward.
        return Outcome.FINAL if reason is StopReason.REWARD_ERROR else Outcome.FAILED

    async def attempt(self, attempt: Callable[[int], Awaitable[Outcome]]) -> bool:
        """Make attempts until one is completed or final, or no retries are left.

        `attempt` is called with a number that starts at 0 and grows with each failure that counts,
        so that a lost episode is played again with the same seed. Returns whether an attempt was
        completed.
        """
        number = 0
        while number <= self._max_retries:
            outcome = await attempt(number)
            if outcome is Outcome.LOST:
                await asyncio.sleep(self.outage.pause_s)
            elif outcome is Outcome.FAILED:
                number += 1
                if self._waits and (pause_s := self.budget.pause_s):
                    await asyncio.sleep(pause_s)
            else:
                return outcome is Outcome.COMPLETED
        return False


def loop_time() -> float:
    """Return the running event loop's time in seconds."""
    return asyncio.get_running_loop().time()


def _pause_s(outage_s: float) -> float:
    return min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, outage_s / 2))
