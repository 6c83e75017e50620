"""Runs the loggers of a run so that none of them can stop or delay it."""

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
"""Seconds after the run's end in which the last metrics may arrive."""


class Loggers:
    """Passes metrics to loggers, each on its own thread; `say` shows people their failures."""

    def __init__(self, loggers: Mapping[str, MetricsLogger], say: Callable[[str], None]) -> None:
        self._loggers = loggers
        self._say = say
        self._threads: list[_LoggerThread] = []

    def open(self, directory: Path, config: RunConfig, *, first_step: int) -> None:
        """Open each logger in its own folder of `directory`; the next step is `first_step`."""
        name, settings = directory.parent.resolve().name, config.model_dump(mode="json")
        for id, logger in self._loggers.items():

            def begin(id: str = id, logger: MetricsLogger = logger) -> str:
                folder = directory / id
                folder.mkdir(parents=True, exist_ok=True)
                return logger.open(folder, name=name, config=settings, first_step=first_step)

            self._threads.append(_LoggerThread(id, logger, begin, self._say))

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Queue a row's numbers for the loggers; returns at once."""
        numbers = {
            name: float(value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float)
        }
        for thread in self._threads:
            thread.log(step, numbers)

    def metrics(self) -> dict[str, float]:
        """Return the number of failures of each logger so far."""
        counts = {f"loggers/failures/{thread.id}": thread.num_failed for thread in self._threads}
        return {name: float(count) for name, count in counts.items()}

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Wait until all rows are logged, for `patience_s` seconds at most."""
        deadline_s = monotonic() + patience_s
        for thread in self._threads:
            thread.rows.put(None)
        for thread in self._threads:
            thread.finish(max(0.0, deadline_s - monotonic()))
        self._threads.clear()


class _LoggerThread(Thread):
    def __init__(
        self, id: str, logger: MetricsLogger, begin: Callable[[], str], say: Callable[[str], None]
    ) -> None:
        # A daemon thread, so that a hanging logger does not keep the program from ending.
        super().__init__(name=f"areal-gym-logger-{id}", daemon=True)
        self.id = id
        self.num_failed = 0
        self.rows: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._logger = logger
        self._begin = begin
        self._say = say
        self.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.is_alive():
            self.rows.put((step, numbers))
        else:
            self.num_failed += 1

    def finish(self, patience_s: float) -> None:
        self.join(patience_s)
        if self.is_alive():
            self._say(f"logger {self.id}: the last rows were not logged in time; they are dropped")
        elif self.num_failed > 1:
            self._say(f"logger {self.id}: {self.num_failed} calls failed")

    def run(self) -> None:
        if self._succeeds(lambda: self._say(f"logger {self.id}: {self._begin()}")):
            while (row := self.rows.get()) is not None:
                self._succeeds(self._logger.log, *row)
            self._succeeds(self._logger.close)

    def _succeeds(self, call: Callable[..., None], *arguments: Any) -> bool:
        try:
            call(*arguments)
        except Exception as error:
            self.num_failed += 1
            if self.num_failed == 1:
                reason = str(error).strip().partition("\n")[0]
                self._say(
                    f"logger {self.id} failed ({type(error).__name__}: {reason}); "
                    "the run continues, and metrics.jsonl has everything"
                )
            return False
        return True
