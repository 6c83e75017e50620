"""The logger contract: a destination of metrics besides `metrics.jsonl`.

A logger is a class; a run's settings name its keyword arguments. It refuses wrong ones when it is
made, which is before the run has waited for anything. Afterwards it may be slow and it may fail:
its methods are called one after another, on a thread that is its own, and what they raise is said
once and counted (`loggers/failures/ID`), but never stops the run::

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
            directory: the logger's own part of the run directory; it exists. What is in it is of
                the same run, before it was interrupted: go on with that.
            name: the run's, for people.
            config: the run's settings, as plain values.
            first_step: of those that will be logged. What was logged of it and later ones, before
                an interruption, was lost to the run and is made again.

        Returns:
            Where people find it: an address, or what to type.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record values by name (docs/metrics.md); some may be NaN or infinite.

        A step is logged once with its training metrics. What was evaluated at it is logged by
        itself, and later: steps do not only grow.
        """

    def close(self) -> None:
        """Finish: everything must have arrived."""
