"""Jobs run in order beside the event loop, and their errors are not lost."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from areal_gym.utils.background_writer import BackgroundWriter


def test_jobs_run_in_order_and_few_wait():
    written: list[int] = []
    gate = threading.Event()

    async def run() -> None:
        writer = BackgroundWriter("test", most_waiting=2)
        await writer.write(gate.wait)
        await writer.write(lambda: written.append(1))
        third = asyncio.create_task(writer.write(lambda: written.append(2)))
        await asyncio.sleep(0.05)
        assert not third.done()  # two wait already; the loop goes on
        gate.set()
        await third
        writer.finish()
        assert written == [1, 2]
        writer.close()
        writer.close()

    asyncio.run(run())


def test_an_error_is_raised_by_the_next_call():
    def fail() -> None:
        raise OSError("full")

    writer = BackgroundWriter("test")
    writer.start(fail)
    with pytest.raises(OSError, match="full"):
        writer.finish()
    written: list[int] = []
    writer.start(lambda: written.append(1))
    writer.finish()
    writer.close()
    assert written == [1]


def test_a_thread_waits_while_another_adds_jobs():
    """Whatever one thread does between another's look at the oldest job and its removal."""
    switching_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer = BackgroundWriter("test")
    written: list[int] = []
    is_over = threading.Event()

    def wait_often() -> None:
        while not is_over.is_set():
            writer.finish()

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait_often) for _ in range(2)]
        try:
            for number in range(3000):
                writer.start(partial(written.append, number))
        finally:
            is_over.set()
            sys.setswitchinterval(switching_s)
        for each in waiting:
            each.result()
    writer.finish()
    writer.close()
    assert written == list(range(3000))
