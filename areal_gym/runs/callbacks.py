"""User callbacks: receive run events in order and may stop training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_gym.errors import StopTraining, UsageError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.types import Group


class Callback:
    """The base class of user callbacks; override the events that you need.

    The run waits for each call, so be quick; what must not keep it waiting, or outlive a failure
    of its own, is a logger (`areal_gym.loggers.base`). Raise `StopTraining` to end the run in an
    orderly way: after the step under way it is saved and evaluated, as at its last step. Any other
    exception ends it as a failure does: what was learned is saved, and the exception is raised.
    """

    def on_start(self, run: RunDir) -> None:
        """The run begins, or goes on, in this directory."""

    def on_step(self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """A step was taken: its row of `metrics.jsonl`, and the groups that were learned from."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The policy of `step`, maybe some steps ago, was measured on held-out tasks."""

    def on_checkpoint(self, step: int, directory: Path) -> None:
        """A checkpoint is on the disk; it may be deleted after the next one."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run has come to its end; `summary` is in `summary.json`."""


class Callbacks:
    """The callbacks of a run, one after another.

    Raises:
        UsageError: one of them is no `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise UsageError(
                    f"{callback!r} is no callback",
                    hints=["give instances of classes derived from areal_gym.Callback"],
                )
        self._callbacks = tuple(callbacks)
        self.stopped: str | None = None
        """Why one of them wants the run to end; None as long as none does."""

    def tell(self, event: str, *facts: Any) -> None:
        """Call the method `event` of each."""
        for callback in self._callbacks:
            try:
                getattr(callback, event)(*facts)
            except StopTraining as stop:
                self.stopped = self.stopped or str(stop) or type(callback).__name__

    def raise_if_stopped(self) -> None:
        """Raise StopTraining if one of them wanted that."""
        if self.stopped is not None:
            raise StopTraining(self.stopped)
