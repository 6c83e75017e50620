"""Episodes in local places whose process is killed (SIGKILL) in one of twenty.

A process plays episodes, eight at a time: a place is started, commands run, one of them leaves
processes behind and writes files, the place ends. At a random moment of every twentieth episode the
whole process is killed, and another goes on. At the end nothing may be left: no process, no mount,
no control group, no directory of a layer that was being made.
"""

import glob
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from areal_gym.sandbox.worker import kernel

NUM_EPISODES, NUM_SMALL = 10_000, 60
PER_PROCESS = 20
SETTLE_S = 60.0

PROGRAM = """
import asyncio, os, random, sys, time
from pathlib import Path
from areal_gym.places import PlaceImage, PlaceLimits
from areal_gym.places.local_images import HOST_ROOT
from areal_gym.places.local_places import LocalPlaces

async def episode(places, number, victim):
    place = await places.start(PlaceImage(folder=Path(sys.argv[3])), LIMITS)
    try:
        kill_s = random.Random(victim).uniform(0.0, 0.15) if number == victim else None
        if kill_s is not None:
            asyncio.get_running_loop().call_later(kill_s, os.kill, os.getpid(), 9)
        command = "setsid sleep 6173 & head -c 1000000 /dev/zero > /big; cat note"
        result = await place.run(["sh", "-c", command], timeout_s=60)
        assert result.stdout == b"here", result
    finally:
        await place.aclose()
    print(number, flush=True)

async def main():
    places = LocalPlaces(cache=Path(sys.argv[1]))
    first, count, victim = map(int, sys.argv[2].split(","))
    slots = asyncio.Semaphore(8)
    async def play(number):
        async with slots:
            await episode(places, number, victim)
    try:
        await asyncio.gather(*map(play, range(first, first + count)))
        if victim >= 0:
            await asyncio.sleep(60)
    finally:
        await places.aclose()

LIMITS = PlaceLimits(memory_mb=128, storage_mb=16, num_processes=32)
asyncio.run(main())
"""


def _left(cache: Path, pids: set[int]) -> dict[str, list[str]]:
    """Return what is left on this machine of places with this cache, which `pids` have made."""
    processes = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            text = Path(path).read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text.startswith("sleep 6173"):
            processes.append(text)
    mounts = [
        row for row in Path("/proc/self/mountinfo").read_text().splitlines() if str(cache) in row
    ]
    # Others of this machine, killed in another group of their own, are not ours to look for.
    groups = [
        path
        for path in glob.glob("/sys/fs/cgroup/**/areal-gym-*", recursive=True)
        if int(os.path.basename(path).split("-")[2]) in pids
    ]
    layers = [str(path) for path in cache.glob("*/new-*")]
    return {"processes": processes, "mounts": mounts, "groups": groups, "layers": layers}


def _play(cache: Path, folder: Path, first: int, victim: int, pids: set[int]) -> tuple[int, int]:
    """Play episodes in a new process of `pids`; return its exit code and how many ended."""
    command = [sys.executable, "-c", PROGRAM, str(cache), f"{first},{PER_PROCESS},{victim}"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, str(folder)], stdout=pipe, stderr=pipe, text=True) as process:
        pids.add(process.pid)
        try:
            output, errors = process.communicate(timeout=600)
        finally:
            process.kill()
    if process.returncode not in (0, -9):
        raise AssertionError(errors[-2000:])
    return process.returncode, len(output.splitlines())


def run(small: bool, directory: Path) -> dict[str, object]:
    """Play the episodes, and look for what is left."""
    kernel.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans would become our children and be seen
    cache, folder = directory / "cache", directory / "task"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM python:3\nWORKDIR /app\nCOPY note .\n")
    (folder / "note").write_text("here")
    rng = random.Random(0)
    num_kills = num_ended = 0
    pids: set[int] = set()
    total = NUM_SMALL if small else NUM_EPISODES
    for first in range(0, total, PER_PROCESS):
        code, ended = _play(cache, folder, first, first + rng.randrange(PER_PROCESS), pids)
        num_kills += code == -9
        num_ended += ended
    assert num_kills >= total // PER_PROCESS * 0.9, num_kills
    # The next start, which is not killed, removes what no kernel removes: groups and layers.
    code, ended = _play(cache, folder, total, -1, pids)
    assert (code, ended) == (0, PER_PROCESS)
    deadline = time.monotonic() + SETTLE_S
    while any(left := _left(cache, pids).values()) and time.monotonic() < deadline:
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        time.sleep(0.2)
    assert not any(left), _left(cache, pids)
    return {"episodes": total, "killed": num_kills, "ended": num_ended}
