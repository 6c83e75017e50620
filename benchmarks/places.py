"""Starts, commands and ends of places, alone and several at a time.

    python benchmarks/places.py [--places local|docker] [--starts 30] [--together 8] [--trials 80]

Medians in milliseconds, and the processor time of this process and its children beside them: on a
busy machine only that can be compared. Docker needs an engine; its image is imported if need be.
A trial is an episode of a task of `harbor:numbers-1` whose solution is executed and then verified
in a fresh place: two starts, a command, `test.sh`, two ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

from areal_gym.envs.harbor.harbor_env import HarborEnv
from areal_gym.places import PlaceImage, PlaceLimits, Places
from areal_gym.places.local_images import HOST_ROOT
from areal_gym.plugins import registry
from areal_gym.sandbox.containers import connect
from areal_gym.sandbox.image import import_host
from areal_gym.sandbox.suite.watch import descendants, read_stat

DOCKER_IMAGE = "areal-gym-places-tests"
LIMITS = PlaceLimits(memory_mb=256, storage_mb=64)
COMMANDS = 5
_TICKS_MS = 1000 / os.sysconf("SC_CLK_TCK")


def processor_ms() -> float:
    """Return the processor time of this process, its children and theirs, as far as they live."""
    pids = {os.getpid(), *descendants(os.getpid())}
    return sum(sum(map(int, read_stat(pid)[11:15])) for pid in pids) * _TICKS_MS


async def timed(times: list[float], call: Callable[[], Awaitable[Any]]) -> Any:
    """Await a call and add its milliseconds."""
    start = time.perf_counter()
    value = await call()
    times.append((time.perf_counter() - start) * 1000)
    return value


async def measure(
    places: Places, image: PlaceImage, num_starts: int, together: int
) -> dict[str, Any]:
    """Return the figures of one backend."""
    times: dict[str, list[float]] = {"start": [], "command": [], "end": []}
    slots = asyncio.Semaphore(together)

    async def episode() -> None:
        async with slots:
            place = await timed(times["start"], lambda: places.start(image, LIMITS))
            for _ in range(COMMANDS):
                await timed(times["command"], lambda: place.run(["true"], timeout_s=60))
            await timed(times["end"], place.aclose)

    await (await places.start(image, LIMITS)).aclose()  # the server, the image
    used, start = processor_ms(), time.perf_counter()
    await asyncio.gather(*(episode() for _ in range(num_starts)))
    seconds = time.perf_counter() - start
    medians = {f"{name}_ms": round(statistics.median(each), 1) for name, each in times.items()}
    best = {f"{name}_min_ms": round(min(each), 1) for name, each in times.items()}
    return {
        "together": together,
        **medians,
        **best,
        "processor_ms_an_episode": round((processor_ms() - used) / num_starts, 1),
        "episodes_a_second": round(num_starts / seconds, 1),
    }


async def measure_trials(places: str, num_trials: int, together: int) -> dict[str, Any]:
    """Return how many verified trials of solutions are played a second."""
    options: dict[str, Any] = {"places": places}
    if places == "docker":
        build = {"build_args": {"BASE_IMAGE": DOCKER_IMAGE}, "build_network": "none"}
        options["places_kwargs"] = build
    slots = asyncio.Semaphore(together)

    async def trial(number: int) -> float:
        async with slots:
            env = HarborEnv("numbers-1", **options)
            try:
                await env.areset(seed=number)
                await env.astep(env.gold_action())
                return (await env.astep("Done.")).reward
            finally:
                await env.aclose()

    await trial(0)  # the server, the image
    used, start = processor_ms(), time.perf_counter()
    rewards = await asyncio.gather(*map(trial, range(num_trials)))
    seconds = time.perf_counter() - start
    assert set(rewards) == {1.0}, rewards
    return {
        "trials": num_trials,
        "together": together,
        "processor_ms_a_trial": round((processor_ms() - used) / num_trials, 1),
        "trials_a_second": round(num_trials / seconds, 1),
    }


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", default="local", help="local, docker, or a plugin's")
    parser.add_argument("--starts", type=int, default=30, help="episodes of each row")
    parser.add_argument(
        "--together", type=int, default=8, help="episodes at a time in the second row"
    )
    parser.add_argument("--trials", type=int, default=80, help="verified trials; 0: none")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.places == "docker":
        with closing(connect()) as client:
            if not client.images.list(f"{DOCKER_IMAGE}:latest"):
                import_host(client, DOCKER_IMAGE)
    image = PlaceImage(reference=HOST_ROOT if options.places == "local" else DOCKER_IMAGE)
    places: Places = registry().make("places", options.places)
    try:
        rows = [
            await measure(places, image, options.starts, together)
            for together in (1, options.together)
        ]
    finally:
        await places.aclose()
    if options.trials:
        rows.append(await measure_trials(options.places, options.trials, options.together))
    for row in rows:
        line = json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items())
        print(line)


if __name__ == "__main__":
    asyncio.run(main())
