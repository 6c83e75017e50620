"""Call users' functions in threads, so that a function that hangs does not stop the run.

    plain function   runs in a worker thread; the caller blocks for at most a millisecond, which is
                     enough for nearly all functions, and then awaits the result
    coroutine        runs in an event loop in its own thread, because it may block instead of await

A thread cannot be killed. When a call exceeds its time limit, an exception is raised in its thread,
which ends loops written in Python, and the thread is not used again. A call that waits inside a C
function continues until that returns. If it holds the interpreter lock meanwhile, all threads
stop; `stall_watch` then writes the line of the call to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from areal_gym.rewards.stall_watch import watch_for_stalls

MAX_THREADS = 32
"""The maximum number of concurrent calls of one function. Further calls wait for a thread; their
time limit does not include this wait."""
_GRACE_S = 0.001
"""How long the event loop may block on a function whose latest call was that fast, in seconds."""
_PROBE_S = 1.0
"""After a timeout, the event loop of coroutines is blocked if it does not react within this time.
"""

_num_forks = 0


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1  # threads are not inherited


os.register_at_fork(after_in_child=_count_fork)


class CallTimeoutError(Exception):
    """A call exceeded its limit; not a TimeoutError, which the function itself may raise."""


class _TimeOverError(BaseException):
    """Raised in the thread of a function that exceeded its limit; `except Exception` does not
    catch it."""


class _Worker:
    """A thread that calls a function each time it reads a byte, and writes one after each call.

    A byte through a pipe wakes the other thread in half the time of a lock, because Linux treats it
    as a hand-over and need not wake a second core.
    """

    def __init__(self) -> None:
        self.function: Callable[..., Any] | None = None
        self.arguments: Mapping[str, Any] = {}
        self.value: Any = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.wake: Callable[[], object] | None = None
        self._begin_in, self._begin_out = os.pipe()
        self._end_in, self._end_out = os.pipe()
        self._ended = select.poll()
        self._ended.register(self._end_in, select.POLLIN)
        self.thread = threading.Thread(target=self._work, name="areal-gym-reward", daemon=True)
        self.thread.start()

    def begin(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Let the thread call the function with these arguments."""
        self.function, self.arguments = function, arguments
        os.write(self._begin_out, b".")

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether the call ends within the time; it is True only once for each call."""
        return bool(self._ended.poll(1000 * timeout_s)) and bool(os.read(self._end_in, 1))

    def _work(self) -> None:
        # The thread ends when the caller closes a pipe: by an OSError, or at the end of the file.
        with contextlib.suppress(_TimeOverError, OSError):
            try:
                while os.read(self._begin_in, 1):
                    self._call()
            finally:
                os.close(self._begin_in)
                os.close(self._end_out)

    def _call(self) -> None:
        assert self.function is not None
        begin_s = time.perf_counter()
        try:
            self.value = self.function(**self.arguments)
        except BaseException as error:  # also SystemExit
            self.error = error
        self.seconds = time.perf_counter() - begin_s
        os.write(self._end_out, b".")
        # Read `wake` after writing the byte: the caller sets it, and then tests `has_ended` again.
        if (wake := self.wake) is not None:
            wake()

    def abandon(self, *, is_interrupted: bool = False) -> None:
        """Do not use the thread again; with `is_interrupted`, raise an exception in its call."""
        os.close(self._begin_out)
        os.close(self._end_in)
        if is_interrupted:
            interrupt_thread(self.thread)


def _abandon_all(workers: set[_Worker]) -> None:
    while workers:
        workers.pop().abandon()


def interrupt_thread(thread: threading.Thread) -> None:
    """Raise an exception in the thread, at its next Python instruction."""
    if thread.ident is not None:
        exception = ctypes.py_object(_TimeOverError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), exception)


class ThreadedCalls:
    """Calls one function in worker threads."""

    def __init__(self, function: Callable[..., Any], timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self.was_fast = True
        """Whether the latest call returned within the time for which the event loop may wait."""
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._queue: deque[Callable[[], object]] = deque()
        self._num_forks = _num_forks
        # Threads end with this object; when the process exits, they are daemons.
        weakref.finalize(self, _abandon_all, self._workers).atexit = False

    def _reset(self) -> None:
        """Forget the threads of the process that this one was forked from."""
        self._idle.clear()
        _abandon_all(self._workers)
        self._queue.clear()
        self._num_forks = _num_forks

    async def __call__(self, arguments: Mapping[str, Any]) -> tuple[Any, BaseException | None]:
        """Return the function's result and the exception that it raised, if any.

        Raises:
            CallTimeoutError: the function did not return within the time limit.
        """
        if self._num_forks != _num_forks:
            self._reset()
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = await self._new_worker()
        worker.begin(self._function, arguments)
        if not (self.was_fast and worker.has_ended(_GRACE_S)):
            await self._finish(worker)
        self.was_fast = worker.seconds < _GRACE_S
        value, error = worker.value, worker.error
        worker.value = worker.error = worker.wake = None
        self._idle.append(worker)
        self._wake_next()
        return value, error

    def _wake_next(self) -> None:
        if self._queue:
            self._queue.popleft()()

    async def _new_worker(self) -> _Worker:
        while len(self._workers) >= MAX_THREADS:
            wake, future = _waker()
            self._queue.append(wake)
            try:
                await future
            except asyncio.CancelledError:
                if wake in self._queue:
                    self._queue.remove(wake)
                else:  # this wait got the free thread already: leave it to the next in the queue
                    self._wake_next()
                raise
            with contextlib.suppress(IndexError):
                return self._idle.pop()
        watch_for_stalls()
        worker = _Worker()
        self._workers.add(worker)
        return worker

    async def _finish(self, worker: _Worker) -> None:
        """Wait for the end of a call without blocking the event loop."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._timeout_s
        try:
            while True:
                wake, future = _waker()
                worker.wake = wake
                if worker.has_ended():
                    return
                if loop.time() >= end_s:
                    raise CallTimeoutError
                timer = loop.call_at(end_s, wake)
                try:
                    await future  # the previous call may have ended the wait: test again
                finally:
                    timer.cancel()
        except BaseException as error:
            self._workers.discard(worker)
            worker.abandon(is_interrupted=isinstance(error, CallTimeoutError))
            self._wake_next()
            raise


def _waker() -> tuple[Callable[[], object], asyncio.Future[None]]:
    """Return a function that any thread may call, and the future of this loop that it completes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not future.done():
            future.set_result(None)

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits
            loop.call_soon_threadsafe(end)

    return wake, future


class _CoroutineThread:
    """An event loop that runs in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.num_forks = _num_forks
        self.thread = threading.Thread(target=self._work, name="areal-gym-rewards", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        with contextlib.suppress(_TimeOverError):
            self.loop.run_forever()


_lock = threading.Lock()
_coroutine_thread: _CoroutineThread | None = None


async def run_coroutine(awaitable: Awaitable[Any], timeout_s: float) -> Any:
    """Run a coroutine in another thread and return its result.

    Raises:
        CallTimeoutError: it did not end within the time limit, even if it never awaits.
        Exception: whatever the coroutine raises.
    """
    global _coroutine_thread
    with _lock:
        thread = _coroutine_thread
        if thread is None or thread.num_forks != _num_forks:
            thread = _coroutine_thread = _CoroutineThread()
    running = asyncio.run_coroutine_threadsafe(_contained(awaitable), thread.loop)
    result = asyncio.wrap_future(running)
    done, _ = await _wait(result, timeout_s)
    if done:
        return result.result()
    result.cancel()
    probe = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), thread.loop)
    answered, _ = await _wait(asyncio.wrap_future(probe), _PROBE_S)
    if not answered:  # the loop is blocked: later coroutines get a new one
        with _lock:
            if _coroutine_thread is thread:
                _coroutine_thread = None
                interrupt_thread(thread.thread)
    raise CallTimeoutError


async def _contained(awaitable: Awaitable[Any]) -> Any:
    """Await it, and raise RuntimeError in place of exceptions that would end the event loop or be
    mistaken for a cancellation by the caller."""
    try:
        return await awaitable
    except (Exception, _TimeOverError):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise RuntimeError(f"it raised {error!r}") from error


async def _wait(future: asyncio.Future[Any], timeout_s: float) -> tuple[set[Any], set[Any]]:
    """Wait for the future; if the caller is cancelled, cancel the future, too."""
    try:
        return await asyncio.wait({future}, timeout=timeout_s)
    except asyncio.CancelledError:
        future.cancel()
        raise
