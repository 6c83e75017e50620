"""Continues runs by itself after one of the trainer's processes has died.

The remaining ranks cannot continue without the dead rank's shard. They are ended, and the run
starts again from its newest checkpoint, in the same process and directory, as with `--resume`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_gym.errors import LostRankError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.run_display import Display
from areal_gym.utils.markup import counted

RESTARTED = "incidents/restarted_trainers"
"""A metric in a step's row: how often the trainer was restarted since the previous row."""


@dataclass(slots=True)
class Restarts:
    """Restarts a run after the death of a rank, and gives up if that does not help."""

    limit: int
    """`trainer.max_restarts`."""
    _in_a_row: int = 0
    _checkpoint_step: int | None = None
    """The step of the newest checkpoint at the previous restart."""
    _has_trained: bool = False
    _rows: list[int | None] = field(default_factory=list)
    """For each restart, the step whose row counts it; None until that row exists."""

    def count_in(self, step: int) -> int:
        """Return how many restarts happened since the row before this step's."""
        self._has_trained = True
        self._rows = [step if row is None else row for row in self._rows]
        return self._rows.count(step)

    def begin(self, error: LostRankError, directory: RunDir, display: Display) -> bool:
        """Announce a restart after the error; return whether the directory is resumed.

        Raises:
            LostRankError: the run must not be restarted: it has taken no step yet, or was restarted
                too often without a new checkpoint.
        """
        from areal_gym.trainer.checkpoint import latest_checkpoint

        checkpoint = latest_checkpoint(directory.checkpoints_dir) if directory.has_begun else None
        step = 0 if checkpoint is None else checkpoint[0]
        if step != self._checkpoint_step:
            self._in_a_row, self._checkpoint_step = 0, step
        if not (self._has_trained or checkpoint) or self._in_a_row >= self.limit:
            raise self._last(error)
        self._in_a_row += 1
        # Rows after the checkpoint are deleted; the restarts that they counted go into the next.
        self._rows = [row if row is not None and row <= step else None for row in self._rows]
        self._rows.append(None)
        line = (
            f"{error}: continuing from "
            + (f"the checkpoint of step {step}" if checkpoint else "the beginning")
            + f" (restart {self._in_a_row} of {self.limit} without a new checkpoint)"
        )
        display.say(line)
        if directory.has_begun:
            directory.append_log(line)
        return directory.has_begun

    def _last(self, error: LostRankError) -> LostRankError:
        if not self.limit or not self._in_a_row:
            return error
        return LostRankError(
            f"{error}, after {counted(self._in_a_row, 'restart')} without a new checkpoint "
            "(trainer.max_restarts)",
            hints=error.hints,
        )
