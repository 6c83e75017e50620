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

    The run waits for each call, so be quick. Code that must not delay the run, or stop it by a
    failure, belongs in a logger (`areal_gym.loggers.base`). Raise `StopTraining` to end the run: it
    finishes the current step, then saves and evaluates as after the last one. Any other exception
    ends the run as a failure does: the policy is saved, and the exception is raised.
    """

    def on_start(self, run: RunDir) -> None:
        """Called when the run begins, or is resumed, in this directory."""

    def on_step(self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Called after a step, with its row of `metrics.jsonl` and the groups it trained on."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called when the policy of `step`, possibly an earlier one, has been evaluated."""

    def on_checkpoint(self, step: int, directory: Path) -> None:
        """Called when a checkpoint is on disk; it may be deleted after the next one."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Called at the end of the run; `summary` is the content of `summary.json`."""


class Callbacks:
    """The callbacks of a run, called one after another.

    Raises:
        UsageError: one of them is not a `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise UsageError(
                    f"{callback!r} is not a callback",
                    hints=["give instances of classes derived from areal_gym.Callback"],
                )
        self._callbacks = tuple(callbacks)
        self.stopped: str | None = None
        """Why the run ends before its last step; None while it goes on."""

    def call(self, event: str, *arguments: Any) -> None:
        """Call the method `event` of each callback."""
        for callback in self._callbacks:
            try:
                getattr(callback, event)(*arguments)
            except StopTraining as stop:
                self.stop(str(stop) or type(callback).__name__)

    def stop(self, reason: str) -> StopTraining:
        """Return what ends the run in an orderly way, for this reason unless there is another."""
        self.stopped = self.stopped or reason
        return StopTraining(self.stopped)

    def raise_if_stopped(self) -> None:
        """Raise StopTraining if a callback has raised it."""
        if self.stopped is not None:
            raise StopTraining(self.stopped)
