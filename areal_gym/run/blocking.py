"""Waiting for a coroutine, wherever one is."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["run_to_end"]

T = TypeVar("T")


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, also where a loop runs already, as in a notebook: on a thread beside it then.

    Ctrl-C cancels the coroutine and waits for what it does about that, in either place; who
    presses it again waits no longer.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
    end: Future[T] = Future()

    async def announced() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.set_result((asyncio.get_running_loop(), task))
        return await main

    def work() -> None:
        try:
            end.set_result(asyncio.run(announced()))
        except BaseException as error:
            end.set_exception(error)

    # What is printed in there belongs to the cell that we are called from.
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name="areal-gym-run", daemon=True).start()
    loop, task = begun.result()
    try:
        return end.result()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        error = end.exception()
        if error is not None and not isinstance(error, asyncio.CancelledError):
            raise error from None
        raise
