"""The interface between a run and its display."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Display:
    """Shows the progress of a run. This base class shows nothing, for scripts and tests.

    `areal_gym.runs.live_display` has displays for people.
    """

    def say(self, text: str) -> None:
        """Show a line of text."""

    def phase(self, name: str, total: int = 0) -> None:
        """Begin a new phase of the run with `total` units, or 0 if that is unknown."""

    def advance(self, done: int, detail: str = "") -> None:
        """Show that `done` units of the phase are done."""

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished training step."""

    def watch(self, stats: Callable[[], str] | None) -> None:
        """Show at each refresh what episodes wait for, from `stats`; None stops that."""

    def close(self) -> None:
        """Restore the terminal."""
