"""How many failed episodes a run may have before it is not worth going on."""

from __future__ import annotations

from collections import Counter, deque

from areal_gym.errors import FailureBudgetError
from areal_gym.types import StopReason

__all__ = ["FailureBudget"]

_WINDOW = 64
_HINTS = {
    StopReason.ENV_ERROR: "look for the cause with: areal-gym check ENV",
    StopReason.AGENT_ERROR: "play one episode by itself: areal-gym eval --env ENV eval.num_tasks=1",
    StopReason.ENGINE_ERROR: "is the engine alive, and the model the right one?",
    StopReason.SANDBOX_ERROR: "see which sandboxes there are: areal-gym list sandboxes",
    StopReason.TIMEOUT: "raise rollout.episode_timeout_s, or play fewer at once with "
    "rollout.max_in_flight",
}


class FailureBudget:
    """Watches the share of failures among the last 64 episodes."""

    def __init__(self, max_rate: float) -> None:
        self._max_rate = max_rate
        self._recent: deque[StopReason] = deque(maxlen=_WINDOW)
        self._last_error = ""

    def record(self, stop_reason: StopReason, error: str | None = None) -> None:
        """Count one episode.

        Raises:
            FailureBudgetError: the budget is exhausted; says where it fails, and the last error.
        """
        self._recent.append(stop_reason)
        if not stop_reason.is_failure:
            return
        self._last_error = error or ""
        num_failed = sum(reason.is_failure for reason in self._recent)
        if len(self._recent) == _WINDOW and num_failed > self._max_rate * _WINDOW:
            raise FailureBudgetError(self.describe(), hints=self.hints())

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
