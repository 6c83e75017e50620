"""Where a run says what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Display(Protocol):
    """What a run tells; `areal_gym.runs.live_display` shows it to a person."""

    def say(self, text: str) -> None:
        """A line of talk."""
        ...

    def phase(self, name: str, total: int = 0) -> None:
        """A new part of the run begins; `total` is its number of units, 0 if unknown."""
        ...

    def advance(self, done: int, detail: str = "") -> None:
        """`done` units of the phase are ready."""
        ...

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """A training step ended."""
        ...

    def watch(self, stats: Callable[[], str] | None) -> None:
        """Where episodes wait, asked for while the display refreshes; None to stop asking."""
        ...


class SilentDisplay:
    """For scripts and tests."""

    def say(self, text: str) -> None:
        """Nothing."""

    def phase(self, name: str, total: int = 0) -> None:
        """Nothing."""

    def advance(self, done: int, detail: str = "") -> None:
        """Nothing."""

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """Nothing."""

    def watch(self, stats: Callable[[], str] | None) -> None:
        """Nothing."""
