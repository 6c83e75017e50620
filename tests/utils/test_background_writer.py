"""Jobs run in order beside the event loop, and their errors are not lost."""

import asyncio
import threading

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
