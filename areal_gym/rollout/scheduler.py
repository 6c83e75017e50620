"""Runs many jobs in a limited number of slots: episodes, and draws of their tasks.

    start_next() -> a free slot -> job -> the slot is free -> start_next() ...

Training (`RolloutRunner`), `evaluate` and `areal_gym.rollout` all use this scheduler. They differ
in the choice of the next job and in their `FailurePolicy`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Self

from areal_gym.errors import InfrastructureError

_MAX_STARTS = 64
"""Jobs that start before the event loop may run something else; each start takes 0.1 ms."""


class EpisodeScheduler:
    """Starts jobs while slots are free. The first error stops it, and no more jobs start.

    Use it as an asynchronous context manager: leaving it cancels all jobs and waits for their end.
    `start_next` spawns the next job and returns 0, or returns the seconds for which no job can
    start; `math.inf` means until another job ends.
    """

    def __init__(self, num_slots: int, start_next: Callable[[], float]) -> None:
        self.error: BaseException | None = None
        """The first error of a job."""
        self._num_slots = num_slots
        self._start_next = start_next
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._wake: asyncio.Handle | None = None
        self._is_start_scheduled = False
        """Whether `_start_more` will start jobs, so that jobs that end meanwhile need not."""

    @property
    def num_running(self) -> int:
        """The number of jobs in slots."""
        return len(self._tasks)

    def start_jobs(self) -> None:
        """Fill the free slots."""
        if self._is_start_scheduled:
            return
        self._cancel_wake()
        num_started = 0
        loop = asyncio.get_running_loop()
        while len(self._tasks) < self._num_slots and self.error is None:
            if num_started == _MAX_STARTS:
                self._wake = loop.call_soon(self._start_more)
                self._is_start_scheduled = True
                return
            num_started += 1
            try:
                wait_s = self._start_next()
            except Exception as error:
                self.stop(error)
                return
            if wait_s > 0:
                if wait_s < math.inf:
                    self._wake = loop.call_later(wait_s, self.start_jobs)
                return

    def spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a job in a slot, which is freed when the job ends."""
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._free_slot)
        return task

    async def changed(self) -> None:
        """Wait until a job has ended since `clear_changed`, or the scheduler has stopped."""
        await self._changed.wait()

    def clear_changed(self) -> None:
        """Forget the jobs that have ended so far; raise the first error of any job."""
        self._changed.clear()
        if self.error is not None:
            raise self.error

    def stop(self, error: BaseException) -> None:
        """Start no more jobs, and raise `error` in `clear_changed`."""
        if self.error is None:
            self.error = error
        self._cancel_wake()
        self._changed.set()

    async def aclose(self) -> None:
        """Cancel all jobs and wait until they have ended. Idempotent."""
        self.stop(InfrastructureError("the scheduler was closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _start_more(self) -> None:
        self._is_start_scheduled = False
        self.start_jobs()

    def _cancel_wake(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None

    def _free_slot(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.stop(error)
        self.start_jobs()
        self._changed.set()


async def run_jobs(jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]], num_slots: int) -> None:
    """Run all jobs, at most `num_slots` at once; each one is created when a slot is free.

    The first error cancels the other jobs, waits for their end and is raised unchanged.
    """
    waiting = iter(jobs)

    def start_next() -> float:
        job = next(waiting, None)
        if job is None:
            return math.inf
        scheduler.spawn(job())
        return 0.0

    async with EpisodeScheduler(num_slots, start_next) as scheduler:
        scheduler.start_jobs()
        while True:
            scheduler.clear_changed()
            if not scheduler.num_running:
                return
            await scheduler.changed()
