"""The loggers of a run: none of them can stop it, or keep it waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

from areal_gym.config import RunConfig
from areal_gym.loggers.base import MetricsLogger

_PATIENCE_S = 60.0
"""How long what was logged may take to arrive after the run's end."""


class Loggers:
    """Hands metrics to loggers, each on a thread of its own.

    Args:
        loggers: by id.
        say: tells people what fails, and where to look.
    """

    def __init__(self, loggers: Mapping[str, MetricsLogger], say: Callable[[str], None]) -> None:
        self._loggers = loggers
        self._say = say
        self._lines: list[_Line] = []

    def open(self, directory: Path, config: RunConfig, *, first_step: int) -> None:
        """Begin.

        Args:
            directory: gets a folder for each logger.
            config: of the run.
            first_step: of those that will be logged.
        """
        name, settings = directory.parent.resolve().name, config.model_dump(mode="json")
        for id, logger in self._loggers.items():

            def begin(id: str = id, logger: MetricsLogger = logger) -> str:
                folder = directory / id
                folder.mkdir(parents=True, exist_ok=True)
                return logger.open(folder, name=name, config=settings, first_step=first_step)

            self._lines.append(_Line(id, logger, begin, self._say))

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Pass a row's numbers on; returns at once."""
        numbers = {
            name: float(value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float)
        }
        for line in self._lines:
            line.log(step, numbers)

    def metrics(self) -> dict[str, float]:
        """How often each logger has failed so far."""
        return {f"loggers/failures/{line.id}": float(line.num_failed) for line in self._lines}

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait until everything has arrived, but not for ever."""
        deadline_s = monotonic() + patience_s
        for line in self._lines:
            line.finish()
        for line in self._lines:
            line.join(max(0.0, deadline_s - monotonic()))
        self._lines.clear()


class _Line:
    """One logger and the thread on which it lives, from `begin` to its `close`."""

    def __init__(
        self, id: str, logger: MetricsLogger, begin: Callable[[], str], say: Callable[[str], None]
    ) -> None:
        self.id = id
        self.num_failed = 0
        """Calls that came to nothing."""
        self._logger = logger
        self._begin = begin
        self._say = say
        self._rows: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        # A daemon: what hangs does not keep the program from ending.
        self._thread = Thread(target=self._live, name=f"areal-gym-logger-{id}", daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._thread.is_alive():
            self._rows.put((step, numbers))
        else:
            self.num_failed += 1

    def finish(self) -> None:
        self._rows.put(None)

    def join(self, patience_s: float) -> None:
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._say(f"logger {self.id}: not everything has arrived in time; it is left alone")
        elif self.num_failed > 1:
            self._say(f"logger {self.id}: {self.num_failed} calls failed")

    def _live(self) -> None:
        try:
            self._say(f"logger {self.id}: {self._begin()}")
        except Exception as error:
            self._failed(error)
            return
        while (row := self._rows.get()) is not None:
            try:
                self._logger.log(*row)
            except Exception as error:
                self._failed(error)
        try:
            self._logger.close()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.num_failed += 1
        if self.num_failed == 1:
            reason = str(error).strip().partition("\n")[0]
            self._say(
                f"logger {self.id} failed ({type(error).__name__}: {reason}); the run goes on, "
                "and metrics.jsonl has everything"
            )
