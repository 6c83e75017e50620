"""Episodes in containers of a Docker engine whose process is killed (SIGKILL) in one of twenty.

As `killed_places`: at the end, after a start that is not killed, no container, volume, folder of a
socket or process may be left. Skipped, and says so, where no engine answers.
"""

import random
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from areal_gym.errors import SandboxError
from areal_gym.places.docker_places import LABEL
from areal_gym.sandbox.containers import connect
from areal_gym.sandbox.image import import_host

NUM_EPISODES, NUM_SMALL = 1_000, 20
PER_PROCESS, PER_SMALL_PROCESS = 20, 5
SETTLE_S = 60.0
IMAGE = "areal-gym-places-tests"

PROGRAM = """
import asyncio, os, random, sys
from areal_gym.places import PlaceImage, PlaceLimits
from areal_gym.places.docker_places import DockerPlaces

async def episode(places, number, victim):
    place = await places.start(PlaceImage(reference=sys.argv[1]), LIMITS)
    try:
        if number == victim:
            delay_s = random.Random(victim).uniform(0.0, 0.3)
            asyncio.get_running_loop().call_later(delay_s, os.kill, os.getpid(), 9)
        command = "sleep 6174 & cat /etc/passwd > /big; echo here"
        result = await place.run(["sh", "-c", command], timeout_s=60)
        assert result.stdout == b"here\\n", result
        await place.freeze()
    finally:
        await place.aclose()
    print(number, flush=True)

async def main():
    places = DockerPlaces(spare=1)
    first, count, victim = map(int, sys.argv[2].split(","))
    slots = asyncio.Semaphore(4)
    async def play(number):
        async with slots:
            await episode(places, number, victim)
    try:
        await asyncio.gather(*map(play, range(first, first + count)))
        if victim >= 0:
            await asyncio.sleep(60)
    finally:
        await places.aclose()

LIMITS = PlaceLimits(memory_mb=128, num_processes=32)
asyncio.run(main())
"""


def _play(temporary: Path, first: int, count: int, victim: int) -> tuple[int, int]:
    """Play episodes in a process; return its exit code and how many ended."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, IMAGE, f"{first},{count},{victim}"],
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if result.returncode not in (0, -9):
        raise AssertionError(result.stderr[-2000:])
    return result.returncode, len(result.stdout.splitlines())


def run(small: bool, directory: Path) -> dict[str, object]:
    """Play the episodes, and look for what is left."""
    try:
        client = connect()
    except SandboxError as error:
        return {"skipped": str(error)}
    with closing(client), tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as short:
        temporary = Path(short)  # paths of sockets are short
        if not client.images.list(f"{IMAGE}:latest"):
            import_host(client, IMAGE)

        def containers() -> set[str]:
            rows = client.containers.list(all=True, sparse=True, filters={"label": LABEL})
            return {row.id for row in rows}

        def left() -> dict[str, object]:
            volumes = client.volumes.list(filters={"dangling": True})
            return {
                "containers": containers() - before,
                "volumes": {volume.id for volume in volumes} - volumes_before,
                "folders": list(temporary.glob("areal-gym-place-*")),
            }

        before = containers()
        volumes_before = {v.id for v in client.volumes.list(filters={"dangling": True})}
        rng = random.Random(0)
        count = PER_SMALL_PROCESS if small else PER_PROCESS
        total = NUM_SMALL if small else NUM_EPISODES
        num_kills = num_ended = 0
        for first in range(0, total, count):
            code, ended = _play(temporary, first, count, first + rng.randrange(count))
            num_kills += code == -9
            num_ended += ended
        assert num_kills >= total // count * 0.9, num_kills
        assert containers() - before, "a killed process leaves containers for the next to remove"
        # The next start, which is not killed, removes what is left.
        assert _play(temporary, total, count, -1) == (0, count)
        deadline = time.monotonic() + SETTLE_S
        while any(left().values()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not any(left().values()), left()
        return {"episodes": total, "killed": num_kills, "ended": num_ended}
