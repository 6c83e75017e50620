"""The memory of a call is limited, for every kind of memory and any number of processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_gym.sandbox import ProcessSandbox, SandboxLimits, SandboxStatus
from areal_gym.sandbox.worker.groups import find_places
from tests._support.paths import ROOT

NOBODY = 65534
MEMORY_MB = 64
LIMITS = SandboxLimits(wall_s=120, cpu_s=120, memory_mb=MEMORY_MB)
WAYS = [(), ("memory group",), ("namespaces",), ("namespaces", "memory group")]

# Children touch memory of one kind; the parent waits until one of them has been killed.
CHILDREN = """
import mmap, os, signal, time
for _ in range(8):
    if os.fork() == 0:
        data = {make}
        for page in range(0, 30 << 20, 4096):
            data[page] = 1
        time.sleep(600)
while True:
    _, status = os.waitpid(-1, 0)
    if os.WIFSIGNALED(status):
        break
os._exit(0)
"""
SOCKETS = """
import array, socket
num_bytes, kept = 0, []
def fill(one):
    global num_bytes
    one.setblocking(False)
    for option in (7, 8, 32, 33):  # SO_SNDBUF, SO_RCVBUF, and both by force
        try: one.setsockopt(socket.SOL_SOCKET, option, 8 << 20)
        except OSError: pass
    try:
        while num_bytes < 1 << 30:
            num_bytes += one.send(bytes(65536))
    except BlockingIOError: pass
try:
    while num_bytes < 1 << 30:
        pair = socket.socketpair()
        fill(pair[0]), fill(pair[1])
        kept.append(pair)
        {more}
except OSError: pass
num_bytes >> 20
"""
IN_FLIGHT = """
        if len(kept) > 1:
            fds = array.array("i", [one.fileno() for one in kept.pop()])
            carrier = socket.socketpair() if len(kept) % 8 == 1 else carrier
            kept.insert(0, carrier)
            carrier[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
"""
PIPES = """
import fcntl, os
num_bytes = 0
try:
    while num_bytes < 1 << 30:
        _, pipe = os.pipe()
        os.set_blocking(pipe, False)
        try: fcntl.fcntl(pipe, 1031, 1 << 20)  # F_SETPIPE_SZ
        except OSError: pass
        try:
            while True: num_bytes += os.write(pipe, bytes(65536))
        except BlockingIOError: pass
except OSError: pass
num_bytes >> 20
"""
# Without a private file system, files are checked periodically: this waits to be ended.
FILES = """
import os, time
num_bytes, kept = 0, []
for directory in range(120):
    os.mkdir(f"d{{directory}}", 0o300)
try:
    for number in range(120):
        file = open(f"d{{number}}/f", "wb")
        {then}
        for _ in range(3): num_bytes += file.write(bytes(1 << 20))
        file.flush()
    time.sleep(600)
except OSError: pass
num_bytes >> 20
"""
REFUSED = """
import ctypes
libc, held = ctypes.CDLL(None, use_errno=True), []
longs = lambda *numbers: [ctypes.c_long(number) for number in numbers]
for name, arguments in {
    "memfd_create": (b"x", 0), "shmget": longs(0, 1 << 20, 0o1600), "inotify_init": (),
    "semget": longs(0, 100, 0o1600), "msgget": longs(0, 0o1600), "fanotify_init": longs(0, 0),
    "vmsplice": (1, None, *longs(0, 0)), "splice": (0, None, 1, None, *longs(1, 0)),
    "tee": longs(0, 1, 1, 0), "sendfile": (1, 0, None, *longs(1)),
    "mq_open": (b"/q", 0o102, 0o600, None),
}.items():
    ctypes.set_errno(0)
    if getattr(libc, name)(*arguments) >= 0 or ctypes.get_errno() != 1:
        held.append(name)
held
"""
TIMERS = """
import ctypes
libc, timer, number = ctypes.CDLL(None), ctypes.c_int(), 0
while number < 5000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0: number += 1
number
"""
PROGRAMS = {
    "private": "data = bytearray(200 << 20)",
    "shared": "import mmap; data = [mmap.mmap(-1, 20 << 20) for _ in range(10)]",
    "private of children": CHILDREN.format(make="bytearray(30 << 20)"),
    "shared of children": CHILDREN.format(make="mmap.mmap(-1, 30 << 20)"),
    "sockets": SOCKETS.format(more=""),
    "in flight": SOCKETS.format(more=IN_FLIGHT.strip()),
    "pipes": PIPES,
    "files": FILES.format(then="pass"),
    "deleted files": FILES.format(then="os.unlink(file.name); kept.append(file)"),
    "refused": REFUSED,
    "timers": TIMERS,
}


async def run_all(without):
    """Run each program; return the protections and each status, value and errors."""
    async with ProcessSandbox(num_workers=2, without=without, limits=LIMITS) as sandbox:
        results = await asyncio.gather(*(sandbox.run(code) for code in PROGRAMS.values()))
        return {
            "protections": (await sandbox.report()).protections,
            "results": {
                name: (str(result.status), result.value, result.stderr)
                for name, result in zip(PROGRAMS, results, strict=True)
            },
        }


def assert_bounded(report):
    """Check that no program held more memory than allowed."""
    protections, results = set(report["protections"]), report["results"]
    if "seccomp" not in protections:
        pytest.skip("this kernel has no seccomp filters")
    assert results["private"][0] == results["shared"][0] == "memory", results
    for name in ("private of children", "shared of children"):
        status, _, errors = results[name]
        if "no fork" in protections:
            assert status == "error"
            assert "PermissionError" in errors
        else:
            assert status == "memory", (name, results[name])
    default = int(Path("/proc/sys/net/core/wmem_default").read_text())
    most = {"sockets": 512 * default >> 20, "in flight": 1024 * default >> 20, "pipes": 16}
    for name, mb in most.items():
        status, value, errors = results[name]
        assert status == "memory" or int(value) <= mb, (name, results[name])
    for name in ("files", "deleted files"):
        status, value, errors = results[name]
        is_bounded = int(value) <= 64 if "private root" in protections else "files" in errors
        assert is_bounded, (name, results[name])
    assert results["refused"][1] == "[]", results["refused"]
    assert int(results["timers"][1]) <= 1024


@pytest.mark.parametrize("without", WAYS)
def test_every_kind_of_memory_is_limited(without):
    assert_bounded(asyncio.run(run_all(without)))


@pytest.mark.parametrize("without", [(), ("namespaces",)])
def test_every_kind_of_memory_is_limited_as_ordinary_user(without):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = (
        "import asyncio, json, sys; from tests._support.ordinary_user import become; "
        f"become({NOBODY}); "
        "import tests.sandbox.test_limits as t; "
        "print(json.dumps(asyncio.run(t.run_all(sys.argv[1:]))))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *without],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr
    assert_bounded(json.loads(process.stdout))


def require_memory_group(runner, sandbox):
    """Skip the test where the kernel's control groups cannot be used."""
    if "memory group" not in runner.run(sandbox.report()).protections:
        pytest.skip("no control group may be made here")


# Each child writes a byte when it has its memory. Children that the kernel killed do not end by
# SIGTERM.
FAMILY = """
import os, signal, time
ends, pids = [], []
for _ in range(4):
    reading, writing = os.pipe()
    pids.append(os.fork())
    if not pids[-1]:
        data = bytearray(20 << 20)
        data[::4096] = b"x" * len(data[::4096])
        os.write(writing, b"x")
        time.sleep(600)
    os.close(writing)
    ends.append(reading)
for end in ends:
    os.read(end, 1)
    os.close(end)
for pid in pids: os.kill(pid, signal.SIGTERM)
[os.waitpid(pid, 0)[1] for pid in pids].count(signal.SIGTERM)
"""


def test_peak_memory_covers_all_processes_of_one_call(runner, sandbox):
    require_memory_group(runner, sandbox)
    limits = SandboxLimits(wall_s=120, cpu_s=120, memory_mb=256)
    assert runner.run(sandbox.run(FAMILY, limits=limits)).peak_memory_mb >= 80
    for _ in range(4):
        assert runner.run(sandbox.run("1", limits=limits)).peak_memory_mb < 60


def test_each_call_has_its_own_memory_limit(runner, sandbox):
    require_memory_group(runner, sandbox)
    small = SandboxLimits(wall_s=120, cpu_s=120, memory_mb=30)
    large = SandboxLimits(wall_s=120, cpu_s=120, memory_mb=256)
    assert runner.run(sandbox.run(FAMILY, limits=small)).status is SandboxStatus.MEMORY
    assert runner.run(sandbox.run(FAMILY, limits=large)).value == "4"

    async def in_a_session(limits):
        session = await sandbox.session()
        try:
            # The limit is lowered with a delay: it must apply before the forks.
            result = await session.run("import time; time.sleep(1)\n" + FAMILY, limits=limits)
            return 0 if result.status is SandboxStatus.MEMORY else int(result.value)
        finally:
            await session.aclose()

    assert runner.run(in_a_session(small)) < 4
    assert runner.run(in_a_session(large)) == 4


def own_groups():
    _, places = find_places(
        Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    )
    prefix = f"areal-gym-{os.getpid()}-"
    return [name for place in places for name in os.listdir(place) if name.startswith(prefix)]


def test_no_control_group_is_left_behind(runner, sandbox):
    require_memory_group(runner, sandbox)

    async def go(is_killed):
        async with ProcessSandbox(num_workers=1) as other:
            await other.run("1")
            made = own_groups()
            if is_killed:
                pid = other.zygotes()[0].server.pid
                os.kill(pid, signal.SIGKILL)
            await other.run("2")
            return made

    before = set(own_groups())
    for is_killed in (False, True):
        assert set(asyncio.run(go(is_killed))) - before
        deadline = time.monotonic() + 60
        while set(own_groups()) != before:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_control_groups_of_both_versions():
    first = "12:cpuset:/\n4:cpu,memory:/docker/abc/inner\n1:name=systemd:/x\n0::/\n"
    mounts = (
        "24 1 8:1 / / rw - ext4 /dev/vda rw\n"
        "40 30 0:33 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n"
        "41 30 0:34 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
        "42 30 0:35 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n"
    )
    assert find_places(first, mounts) == ("cgroup", ["/sys/fs/cgroup/memory/inner"])
    second = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run.scope\n"
    only = "40 30 0:33 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    slices = "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/app.slice"
    assert find_places(second, only) == ("cgroup2", [f"{slices}/run.scope", slices])
    with pytest.raises(FileNotFoundError):
        find_places("0::/\n", "24 1 8:1 / / rw - ext4 /dev/vda rw\n")


def test_common_library_features_work_in_the_sandbox(execute):
    code = """
import asyncio, multiprocessing, os, shutil, socket, subprocess, tempfile, threading
async def main():
    reader = await asyncio.to_thread(lambda: 1)
    await asyncio.gather(*(asyncio.sleep(0) for _ in range(50)))
    return reader
numbers = [asyncio.run(main())]
thread = threading.Thread(target=numbers.append, args=(2,))
thread.start(); thread.join()
with tempfile.TemporaryDirectory() as directory:
    with open(f"{directory}/a", "w") as file: file.write("3")
    shutil.copyfile(f"{directory}/a", f"{directory}/b")
    numbers.append(int(open(f"{directory}/b").read()))
left, right = socket.socketpair()
left.sendall(b"4"); numbers.append(int(right.recv(9)))
try:
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=theirs.send, args=(5,))
    process.start(); numbers.append(mine.recv()); process.join()
    numbers.append(int(subprocess.run(["/bin/echo", "6"], capture_output=True).stdout))
except PermissionError:
    numbers += [5, 6]
numbers
"""
    assert execute(code).value == "[1, 2, 3, 4, 5, 6]"
