"""Drops tasks whose verifier keeps failing, because their episodes never get a reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from areal_gym.errors import FailureBudgetError
from areal_gym.types import StopReason, Trajectory

MOST_FAILURES = 3
"""A task is dropped after this many episodes in a row in which its verifier gave no reward."""
_MOST_DRAWS = 200
"""The search for a task that was not dropped ends after this many draws."""


class BrokenTasks:
    """Counts the verifier failures (`TaskError`) of each task and drops tasks that fail too often.

    A reward of any value resets the task's count.

    Args:
        dropped: ids of the tasks that an interrupted run had dropped.
        on_drop: called with the id and the last error of each task that is dropped.
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
        """Check that tasks are left to play.

        Args:
            num_draws: how many draws in a row gave a dropped task.
            num_tasks: the number of tasks in the split; None if it is endless.

        Raises:
            FailureBudgetError: every task was dropped, or too many draws gave a dropped one.
        """
        if num_draws < _MOST_DRAWS and (num_tasks is None or len(self.dropped) < num_tasks):
            return
        raise FailureBudgetError(
            f"no task is left to play: {len(self.dropped)} were dropped, because their verifiers "
            f"gave no reward {MOST_FAILURES} times in a row; the last error: {self._last_error}",
            hints=["look for the cause with: areal-gym check ENV"],
        )
