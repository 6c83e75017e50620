"""Jobs that write files, one after the other in a thread, beside an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class BackgroundWriter:
    """Runs jobs in their order. What a job raises, the next call raises; later jobs still run.

    Args:
        name: the thread's.
        most_waiting: how many jobs may wait before `write` waits: what they hold stays in memory.
    """

    def __init__(self, name: str, most_waiting: int = 2) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"areal-gym-{name}")
        self._most_waiting = most_waiting
        self._jobs: deque[Future[object]] = deque()

    def start(self, job: Callable[[], object]) -> None:
        """Start a job, however many wait."""
        self._raise_errors()
        self._jobs.append(self._thread.submit(job))

    async def write(self, job: Callable[[], object]) -> None:
        """Start a job, as soon as few enough others wait."""
        while len(self._jobs) >= self._most_waiting:
            await asyncio.to_thread(wait, [self._jobs[0]])
            self._raise_errors()
        self.start(job)

    def finish(self) -> None:
        """Block until all jobs have ended."""
        wait(list(self._jobs))
        self._raise_errors()

    def close(self) -> None:
        """End the thread once all jobs have ended; raises nothing. Idempotent."""
        self._thread.shutdown()

    def _raise_errors(self) -> None:
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
