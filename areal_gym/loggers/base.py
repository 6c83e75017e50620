"""The interface of loggers, which send metrics to destinations besides `metrics.jsonl`.

A logger is a class whose keyword arguments are in the run's settings. The constructor raises an
error for wrong arguments, before the run starts. Afterwards a logger may be slow and may fail: its
methods are called one after another in a separate thread, and their errors are reported once and
counted (`loggers/failures/ID`), but never stop the run::

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
        """Start a run, or continue the one that was started in `directory`.

        Args:
            directory: the logger's folder in the run directory, which exists. If it has files,
                they are from the same run before an interruption.
            name: the run's name to display.
            config: the run's settings, as plain values.
            first_step: the first step that will be logged. Steps from there on that were logged
                before an interruption are lost and repeated.

        Returns:
            A URL or a command with which users see the metrics.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record values by name (docs/metrics.md); some may be NaN or infinite.

        A step is logged once with its training metrics. Its evaluation is logged separately and
        later, so `step` may be lower than in the call before.
        """

    def close(self) -> None:
        """Send everything that is left, and finish."""
