"""Run jobs that write files in a thread, one after another, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class BackgroundWriter:
    """Runs jobs in order. The next call raises the error of a failed job; later jobs still run.

    Args:
        name: the name of the thread.
        most_waiting: the number of unfinished jobs from which on `write` waits, to limit memory.
    """

    def __init__(self, name: str, most_waiting: int = 2) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"areal-gym-{name}")
        self._most_waiting = most_waiting
        self._jobs: deque[Future[object]] = deque()

    def start(self, job: Callable[[], object]) -> None:
        """Add a job without waiting."""
        self._raise_errors()
        self._jobs.append(self._thread.submit(job))

    async def write(self, job: Callable[[], object]) -> None:
        """Add a job; wait before while `most_waiting` jobs are unfinished."""
        while len(self._jobs) >= self._most_waiting:
            await asyncio.to_thread(wait, [self._jobs[0]])
            self._raise_errors()
        self.start(job)

    def finish(self) -> None:
        """Block until all jobs have ended."""
        wait(list(self._jobs))
        self._raise_errors()

    def close(self) -> None:
        """Wait for all jobs and end the thread; errors of jobs are not raised. Idempotent."""
        self._thread.shutdown()

    def _raise_errors(self) -> None:
        while self._jobs and self._jobs[0].done():
            self._jobs.popleft().result()
