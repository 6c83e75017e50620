"""The logger contract: a destination of metrics besides `metrics.jsonl`.

A logger is a class; a run's settings name its keyword arguments. It refuses wrong ones when it is
made, before the run has waited for anything. Afterwards it may be slow and it may fail: its methods
are called one after another on a thread of its own, and their errors are reported once and counted
(`loggers/failures/ID`), but never stop the run::

    class Csv:
        def __init__(self, separator: str = ",") -> None: ...
        def open(self, directory, *, name, config, first_step): ...
        def log(self, step, metrics): ...
        def close(self): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

__all__ = ["MetricsLogger"]


class MetricsLogger(Protocol):
    """A destination of a run's metrics."""

    def open(
        self, directory: Path, *, name: str, config: Mapping[str, Any], first_step: int
    ) -> str:
        """Begin a run, or continue the one that was begun in `directory`.

        Args:
            directory: the logger's own part of the run directory; it exists. Files in it are of
                the same run before it was interrupted, and are continued.
            name: the run's name, for people.
            config: the run's settings, as plain values.
            first_step: the first step that will be logged. If an interrupted run logged it or
                later ones, the run has lost them and makes them again.

        Returns:
            Where people see the metrics: an address, or a command.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record values by name (docs/metrics.md); some may be NaN or infinite.

        A step is logged once with its training metrics. Its evaluation is logged separately and
        later, so that steps do not only grow.
        """

    def close(self) -> None:
        """Finish, after everything has arrived."""
