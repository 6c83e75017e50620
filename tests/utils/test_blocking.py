"""Coroutines that are waited for, and the signals that come meanwhile."""

import asyncio
import os
import signal
import threading
import time

import pytest

from areal_gym.utils import blocking
from areal_gym.utils.blocking import interruptible, run_to_end


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """Reset signals that the caller of the tests ignores, as `nohup` and `&` do."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def here(make):
    return run_to_end(make())


def in_a_notebook(make):
    async def cell():
        return run_to_end(make())

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


@pytest.mark.parametrize("place", [here, in_a_notebook])
class TestRunToEnd:
    def test_run_blocking_returns_the_coroutines_result(self, place):
        async def work():
            await asyncio.sleep(0)
            return 7

        async def fail():
            raise ZeroDivisionError

        assert place(work) == 7
        with pytest.raises(ZeroDivisionError):
            place(fail)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_interrupt_cancels_and_repeated_interrupt_is_ignored(self, place, number):
        saved = []

        async def work():
            os.kill(os.getpid(), number)
            try:
                await asyncio.sleep(60)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.05)
                saved.append("all")

        with pytest.raises(KeyboardInterrupt):
            place(work)
        assert saved == ["all"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_error_while_saving_is_raised(self, place):
        async def work():
            os.kill(os.getpid(), signal.SIGINT)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise OSError("the disk is full") from None

        with pytest.raises(OSError, match="the disk is full"):
            place(work)


def test_second_interrupt_stops_waiting(monkeypatch):
    monkeypatch.setattr(blocking, "_ONE_PRESS_S", 0.01)
    pressed = []

    def press_twice():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)
        assert pressed == [1]
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with interruptible(lambda: pressed.append(1)), pytest.raises(KeyboardInterrupt):
        press_twice()
    assert pressed == [1]


def test_foreign_signal_handlers_are_kept():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with interruptible(lambda: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

    def elsewhere():
        with interruptible(lambda: None):
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
