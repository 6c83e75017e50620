"""Run a coroutine from synchronous code, and handle interrupts."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_ONE_PRESS_S = 1.0
"""Signals within this time count as one Ctrl-C, because parent programs may send it, too."""


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does; if a loop is running (notebooks), in another thread.

    An interrupt (see `interruptible`) cancels the coroutine, waits for its cleanup, and raises
    KeyboardInterrupt.
    """
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    is_interrupted = False

    async def announced() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.append((asyncio.get_running_loop(), task))
        return await main

    def interrupt() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        if not started:
            raise KeyboardInterrupt
        loop, task = started[0]
        loop.call_soon_threadsafe(task.cancel)

    run = asyncio.run if asyncio._get_running_loop() is None else _run_beside
    with interruptible(interrupt):
        try:
            return run(announced())
        except asyncio.CancelledError:
            if is_interrupted:
                raise KeyboardInterrupt from None
            raise


def _run_beside(main: Coroutine[Any, Any, T]) -> T:
    end: Future[T] = Future()

    def work() -> None:
        try:
            end.set_result(asyncio.run(main))
        except BaseException as error:
            end.set_exception(error)

    # With the caller's context, the thread's output appears below the same notebook cell.
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name="areal-gym-run", daemon=True).start()
    return end.result()


async def unbroken(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, without cancelling it if the caller is cancelled.

    The cancellation is raised when the caller next waits for something else, also after several
    calls of this function.
    """
    task = asyncio.create_task(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    current = asyncio.current_task()
    if is_cancelled and current is not None:
        current.cancel()
        current.uncancel()  # the request was counted when it was made
    return task.result()


@contextmanager
def interruptible(on_interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `on_interrupt` once on Ctrl-C, SIGTERM or SIGHUP inside this context.

    A second Ctrl-C, more than a second later, raises KeyboardInterrupt at once. Signals that other
    code handles or ignores stay as they are; so do all signals outside the main thread.
    """
    first_s: float | None = None

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if first_s is None:
            first_s = time.monotonic()
            on_interrupt()
        elif time.monotonic() - first_s > _ONE_PRESS_S:
            raise KeyboardInterrupt

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        defaults = {signal.default_int_handler, signal.SIG_DFL}
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) in defaults}
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
