"""Threads that call a user's function, and what they leave behind."""

import asyncio
import os
import threading
import time

import pytest

from areal_gym.rewards.guarded_calls import CallTimeoutError, ThreadedCalls


def num_open_files():
    return len(os.listdir("/proc/self/fd"))


def num_threads():
    return sum(thread.name == "areal-gym-reward" for thread in threading.enumerate())


def wait_until(is_so):
    end_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts open files by /proc")
def test_threads_and_their_pipes_end_with_the_object():
    async def play():
        calls = ThreadedCalls(lambda seconds: time.sleep(seconds), 60.0)
        return await asyncio.gather(*(calls({"seconds": 0.05}) for _ in range(5)))

    async def empty():
        await asyncio.sleep(0)

    asyncio.run(empty())
    threads, files = num_threads(), num_open_files()
    assert asyncio.run(play()) == [(None, None)] * 5
    wait_until(lambda: num_threads() == threads and num_open_files() == files)


def test_a_call_whose_time_is_over_leaves_no_thread_when_it_returns():
    is_over = threading.Event()
    threads = num_threads()

    async def play():
        calls = ThreadedCalls(lambda: is_over.wait(60), 0.05)  # a wait in C is not interrupted
        with pytest.raises(CallTimeoutError):
            await calls({})
        assert num_threads() == threads + 1
        is_over.set()
        return await calls({})  # by another thread

    assert asyncio.run(play()) == (True, None)
    wait_until(lambda: num_threads() == threads)
