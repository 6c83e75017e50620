"""Event loops on threads of their own, for synchronous callers of asynchronous code."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class KeptLoop:
    """Runs one long-lived loop on a thread, started on first use and again in a forked process.

    Callers may be inside a loop of their own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        # A forked worker (Gymnasium's AsyncVectorEnv) inherits the loop but not its thread.
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; the caller waits for it.

        An interrupt (Ctrl-C) cancels the coroutine and waits for its end; a second one does not
        wait. Never call this on the loop's own thread.
        """
        with self._lock:
            loop = self._loop
            if loop is None:
                loop = self._loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name=self._name, daemon=True).start()
        tasks: list[asyncio.Task[T]] = []
        has_ended = threading.Event()

        def begin() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: has_ended.set())

        loop.call_soon_threadsafe(begin)
        try:
            has_ended.wait()
        except BaseException:
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            has_ended.wait()
            if not tasks[0].cancelled() and tasks[0].exception() is not None:
                return tasks[0].result()
            raise
        return tasks[0].result()

    def _end(self) -> None:
        """Cancel tasks and close asynchronous generators, as `asyncio.run` does."""
        loop = self._loop
        if loop is not None:
            ended = asyncio.run_coroutine_threadsafe(_clean_up(), loop)
            with contextlib.suppress(TimeoutError):
                ended.result(timeout=5)

    def _forget(self) -> None:
        self._loop, self._lock = None, threading.Lock()


async def _clean_up() -> None:
    """Let tasks and generators of the running loop close their connections and processes."""
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=4)
    await asyncio.get_running_loop().shutdown_asyncgens()


_loop = KeptLoop("areal-gym-env-loop")


def run_on_kept_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run on one long-lived loop thread, so that sandboxes and sessions survive between steps."""
    return _loop.run(coroutine)
