"""Run jobs that write files in a thread, one after another, without blocking the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class BackgroundWriter:
    """Runs jobs in order. The next call raises the error of a failed job; later jobs still run.

    A thread may wait in `finish` while another adds jobs: a checkpoint is saved beside rollouts.

    Args:
        name: the name of the thread.
        most_waiting: the number of unfinished jobs from which on `write` waits, to limit memory.
    """

    def __init__(self, name: str, most_waiting: int = 2) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"areal-gym-{name}")
        self._most_waiting = most_waiting
        self._jobs: deque[Future[object]] = deque()
        self._lock = threading.Lock()

    def start(self, job: Callable[[], object]) -> None:
        """Add a job without waiting."""
        self._raise_errors()
        with self._lock:
            self._jobs.append(self._thread.submit(job))

    async def write(self, job: Callable[[], object]) -> None:
        """Add a job; wait before while `most_waiting` jobs are unfinished."""
        while len(unfinished := self._unfinished()) >= self._most_waiting:
            await asyncio.to_thread(wait, unfinished[:1])
            self._raise_errors()
        self.start(job)

    def finish(self) -> None:
        """Block until all jobs have ended that were added before."""
        wait(self._unfinished())
        self._raise_errors()

    def close(self) -> None:
        """Wait for all jobs and end the thread; errors of jobs are not raised. Idempotent."""
        self._thread.shutdown()

    def _unfinished(self) -> list[Future[object]]:
        """Return the jobs that had not ended at the last call, the oldest first."""
        with self._lock:
            return list(self._jobs)

    def _raise_errors(self) -> None:
        while (job := self._next_ended()) is not None:
            job.result()

    def _next_ended(self) -> Future[object] | None:
        with self._lock:
            return self._jobs.popleft() if self._jobs and self._jobs[0].done() else None
