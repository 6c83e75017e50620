"""Drops tasks whose own verifier fails again and again: their episodes give no reward at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from areal_gym.errors import FailureBudgetError
from areal_gym.types import StopReason, Trajectory

MOST_FAILURES = 3
"""So many episodes of a task in a row without a reward from its verifier drop it."""
_MOST_DRAWS = 200


class BrokenTasks:
    """Counts the verifier's failures of each task (`TaskError`), and knows the dropped tasks.

    A reward, whatever its value, clears the task's count. `dropped` are ids that an interrupted run
    has dropped; `on_drop` is called with the id and the last error of each new one.
    """

    def __init__(
        self, dropped: Iterable[str] = (), on_drop: Callable[[str, str], None] | None = None
    ) -> None:
        self.dropped = list(dropped)
        self._failures: Counter[str] = Counter()
        self._on_drop = on_drop
        self._last_error = ""

    def __contains__(self, task_id: str) -> bool:
        return task_id in self.dropped

    def record(self, trajectory: Trajectory) -> None:
        """Count an episode that has ended."""
        id = trajectory.task.id
        if not trajectory.stop_reason.is_failure:
            del self._failures[id]
        elif trajectory.stop_reason is StopReason.TASK_ERROR and id not in self:
            self._failures[id] += 1
            if self._failures[id] >= MOST_FAILURES:
                self._last_error = trajectory.error or ""
                self.dropped.append(id)
                if self._on_drop is not None:
                    self._on_drop(id, self._last_error)

    def require_others(self, num_draws: int, num_tasks: int | None) -> None:
        """Raise FailureBudgetError if there is no other task, or none was drawn `num_draws` times.

        `num_tasks` are all tasks of the split; None: endless.
        """
        if num_draws < _MOST_DRAWS and (num_tasks is None or len(self.dropped) < num_tasks):
            return
        raise FailureBudgetError(
            f"no task is left to play: {len(self.dropped)} were dropped, because their verifiers "
            f"gave no reward {MOST_FAILURES} times in a row; the last error: {self._last_error}",
            hints=["look for the cause with: areal-gym check ENV"],
        )
