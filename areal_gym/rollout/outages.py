"""What an outage does to a run: episodes wait and are played again; none is lost, none shrinks.

    server lost -> its episodes come back as lost -> their groups are played again, whole, with
                   the seeds they had                       |
                                                            v
                   all that was in flight was lost?   also those that were complete already, from
                                                      the first lost group on

Keeping what had ended before an outage would favour short episodes: long ones are what an outage
hits. So a group is played again whole, and where everything in flight was lost, groups that had
started since the first lost one are, too, as far as they have not been trained on: whether a group
is kept then depends on when it started, and not on how long it took.

Nothing of this costs a retry. The outage itself is bounded by `rollout.outage_patience_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from areal_gym.errors import FailureBudgetError
from areal_gym.types import StopReason, Trajectory

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 10.0
_INFRASTRUCTURE = frozenset(
    {StopReason.ENGINE_ERROR, StopReason.SANDBOX_ERROR, StopReason.WORKER_ERROR}
)


def is_infrastructure_failure(trajectory: Trajectory) -> bool:
    """Whether neither the environment nor the agent is at fault."""
    return trajectory.is_lost or trajectory.stop_reason in _INFRASTRUCTURE


class Outage:
    """Measures how long nothing has come through, and ends the run when that is too long.

    Args:
        patience_s: how long an outage may last.
        clock: seconds.
        engine_outage_s: for how long the engine has had no server; 0 while it has one.
    """

    def __init__(
        self,
        patience_s: float,
        *,
        clock: Callable[[], float],
        engine_outage_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.patience_s = patience_s
        self.last_error = ""
        self._clock = clock
        self._engine_outage_s = engine_outage_s
        self._since_s: float | None = None
        self._hold_until_s = 0.0

    @property
    def seconds(self) -> float:
        """How long the outage has lasted; 0 when there is none."""
        own_s = 0.0 if self._since_s is None else self._clock() - self._since_s
        return max(own_s, self._engine_outage_s())

    @property
    def hold_s(self) -> float:
        """For how long no episode should start."""
        return max(0.0, self._hold_until_s - self._clock())

    @property
    def pause_s(self) -> float:
        """How long to wait before what was lost is tried again: half the outage so far."""
        return min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, self.seconds / 2))

    def hold(self, seconds: float) -> None:
        """Let no episode start for so long."""
        self._hold_until_s = max(self._hold_until_s, self._clock() + seconds)

    def lost(self, error: str | None) -> None:
        """Record an episode that was lost.

        Raises:
            FailureBudgetError: the outage has lasted longer than the patience.
        """
        self.last_error = error or ""
        if self._since_s is None:
            self._since_s = self._clock()
        if self.seconds <= self.patience_s:
            return
        raise FailureBudgetError(
            f"waited {self.seconds:.0f} s for servers to come back, and nothing came through; "
            f"rollout.outage_patience_s = {self.patience_s:g}; the last error: {self.last_error}",
            hints=[
                "start what is gone again, then go on with --resume: no group is lost",
                "wait for longer next time: rollout.outage_patience_s=SECONDS",
            ],
        )

    def came_through(self) -> None:
        """Record an episode that ended as it should."""
        self._since_s = None
        self._hold_until_s = 0.0


@dataclass(slots=True)
class Suspects:
    """Groups in flight when an outage was noticed: was everything lost, or only a part?

    Until that is known, no batch is handed out.
    """

    since: int
    """The first group that was hit; later ones that are complete may have been favoured."""
    at_risk: set[int] = field(default_factory=set)
    """Groups that were in flight, and of which it is not known yet whether they were hit."""

    @classmethod
    def of(cls, hit: int, in_flight: Iterable[int]) -> Suspects:
        """The suspects at the moment when the first lost episode of group `hit` was noticed."""
        return cls(since=hit, at_risk={index for index in in_flight if index != hit})

    @property
    def are_all_hit(self) -> bool:
        """Whether every group that was in flight was lost."""
        return not self.at_risk

    def hit(self, index: int) -> None:
        """This group was lost, too."""
        self.since = min(self.since, index)
        self.at_risk.discard(index)
