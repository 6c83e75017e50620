"""Processes of sessions are stopped between calls."""

import asyncio
import time
from pathlib import Path

import pytest

from areal_gym.sandbox import ProcessSandbox, SandboxLimits, SandboxStatus
from tests._support.processes import is_running

LIMITS = SandboxLimits(wall_s=60.0)
PATIENCE_S = 120.0
LEVELS = pytest.mark.parametrize("without", [[], ["namespaces"]], ids=["isolated", "filtered"])


def descendants(pid):
    """Return all descendants of `pid`."""
    pids = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for word in (task / "children").read_text().split():
            pids += [int(word), *descendants(word)]
    return pids


def states(sandbox):
    """Return the process states of all descendants of the fork server."""
    (zygote,) = sandbox.zygotes()
    process_states = []
    for pid in descendants(zygote.server.pid):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            process_states.append(stat.rpartition(")")[2].split()[0])
        except OSError:
            continue
    return process_states


async def until_stopped(sandbox, num_processes):
    """Wait until at least `num_processes` are stopped and none runs, twice in a row."""
    deadline = time.monotonic() + PATIENCE_S
    times = 0
    while times < 2:
        now = states(sandbox)
        at_rest = now.count("T") >= num_processes and now.count("R") == 0
        times = times + 1 if at_rest else 0
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.05)


def run_in_session(without, *codes, num_stopped=1):
    """Run snippets in one session that is stopped between them; return their values."""

    async def go():
        async with ProcessSandbox(num_workers=1, without=without) as sandbox:
            session = await sandbox.session()
            values = []
            for code in codes:
                if values:
                    await until_stopped(sandbox, num_stopped)
                result = await session.run(code, limits=LIMITS)
                assert result.is_ok, result
                values.append(result.value)
            await session.aclose()
        return values

    return asyncio.run(go())


THREAD = "import threading, time\ncount = 0\ndef work():\n    global count\n    while True:\n"
SPIN = THREAD + "        count += 1\nthreading.Thread(target=work, daemon=True).start()"
FLOOD = THREAD.replace("time", "os", 1) + (
    "        count += 1\n        os.write(3, b'x' * 100)\n"
    "        os.write(1, b'')\nthreading.Thread(target=work, daemon=True).start()"
)
GOES_ON = "seen = count\nwhile count == seen: pass\n'on'"


@LEVELS
def test_threads_stop_between_calls_and_continue_in_the_next(without):
    assert run_in_session(without, SPIN, GOES_ON, GOES_ON)[1:] == ["'on'", "'on'"]


@LEVELS
def test_channel_flood_by_a_thread_ends_only_its_session(without):
    async def go():
        async with ProcessSandbox(num_workers=1, without=without) as sandbox:
            session = await sandbox.session()
            statuses = {(await session.run(code, limits=LIMITS)).status for code in (FLOOD, "5")}
            served = await sandbox.run("6", limits=LIMITS)
            await session.aclose()
            return statuses, served.value

    statuses, served = asyncio.run(go())
    assert statuses <= {SandboxStatus.OK, SandboxStatus.KILLED}
    assert served == "6"


def test_name_that_is_not_text_does_not_end_other_sessions():
    """The fork server reads the names of processes, which snippets choose, while it stops them."""

    async def go():
        async with ProcessSandbox(num_workers=1) as sandbox:
            session, other = await sandbox.session(), await sandbox.session()
            await other.run("kept = 6", limits=LIMITS)
            rename = r"import ctypes; ctypes.CDLL(None).prctl(15, b'\xff\xfe', 0, 0, 0)"
            assert (await session.run(rename, limits=LIMITS)).value == "0"
            await until_stopped(sandbox, 2)
            assert (await other.run("kept", limits=LIMITS)).value == "6"
            await session.aclose()
            await other.aclose()

    asyncio.run(go())


SPINNING_CHILDREN = """
import os, signal
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        while True: pass
7
"""


def test_detached_children_stop_between_calls():
    assert run_in_session([], SPINNING_CHILDREN, "8", num_stopped=4) == ["7", "8"]


STORM = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(2):
    if os.fork() == 0:
        while True:
            try:
                if os.fork(): os._exit(0)
            except OSError: pass
"""
WAKERS = """
import os, signal
pids = [os.getpid()]
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        while True:
            for other in range(1, 20):
                try: os.kill(other, signal.SIGCONT)
                except OSError: pass
    pids.append(pid)
"""


@pytest.mark.parametrize("code", [STORM, WAKERS], ids=["storm", "wakers"])
def test_processes_that_resist_stopping_are_ended(code):
    async def go():
        async with ProcessSandbox(num_workers=1) as sandbox:
            session = await sandbox.session()
            await session.run(code, limits=LIMITS)
            await until_stopped(sandbox, 0)
            result = await session.run("1", limits=LIMITS)
            await session.aclose()
            return result

    assert asyncio.run(go()).value == "1"


WAKE_UP = """
import ctypes, fcntl, os, signal
libc = ctypes.CDLL(None, use_errno=True)
event = (ctypes.c_int * 16)(0, 0, signal.SIGCONT, 0)
timer = libc.syscall(222 if os.uname().machine == "x86_64" else 107, 1, event, (ctypes.c_long)())
answers = [timer, ctypes.get_errno()]
reading, writing = os.pipe()
try:
    answers.append(fcntl.fcntl(reading, 10, signal.SIGCONT))
except PermissionError:
    answers.append("refused")
answers
"""


@LEVELS
def test_stopped_process_cannot_schedule_its_wake_up(without):
    assert run_in_session(without, WAKE_UP) == ["[-1, 1, 'refused']"]


def test_stopped_session_ends_when_closed():
    async def go():
        async with ProcessSandbox(num_workers=1) as sandbox:
            session = await sandbox.session()
            await session.run(SPINNING_CHILDREN, limits=LIMITS)
            await until_stopped(sandbox, 4)
            (zygote,) = sandbox.zygotes()
            pids = [p for p in descendants(zygote.server.pid) if is_stopped(p)]
            assert len(pids) >= 4
            await session.aclose()
            return [pid for pid in pids if is_running(pid)]

    assert asyncio.run(go()) == []


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
