"""Episodes per second with environments in one and in two processes.

    python benchmarks/ray_rollout.py [--json] [--episodes N] [--work MS] [--workers 1 2]

Each episode has three turns, and after each the environment computes for a while (10 ms on an idle
machine), as a grader or a simulator does. The policy answers at once, so that it is the
environments alone that are waited for. Rounds of one and of two workers take turns, and the best
round of each counts.

On a busy machine two processes do not get twice the time of one: next to the ratio stands that of
plain processes which only compute, measured in the same rounds. What does not depend on others is
the processor time of this process per episode, which says how many workers it can keep busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import load_config
from areal_gym.distributed.cluster import open_cluster
from areal_gym.distributed.rollout_workers import RolloutWorkers, WorkerSetup
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.engines.server import EngineServer
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.envs.base import Response, TextEnv
from areal_gym.rollout.episode_runners import (
    EpisodeRequest,
    EpisodeRunner,
    EpisodeSetup,
    LocalEpisodeRunner,
)
from areal_gym.types import Message, Task

NUM_TURNS = 3
ROUNDS = 3
PLAIN = 20_000_000


class Busy(TextEnv):
    """Computes in Python, and holds its process' interpreter meanwhile."""

    max_turns = NUM_TURNS + 1

    def __init__(self, num_rounds: int) -> None:
        super().__init__()
        self.num_rounds = num_rounds

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        raise AssertionError("tasks are given")

    def first_messages(self, task: Task) -> Sequence[Message]:
        return [{"role": "user", "content": f"How far is {task.id}?"}]

    async def respond(self, message: Message) -> Response:
        compute(self.num_rounds)
        if self.num_turns == NUM_TURNS:
            return Response(reward=1.0, is_terminated=True)
        return Response(messages=[{"role": "user", "content": "And now?"}])


def compute(num_rounds: int) -> int:
    number = 1
    for _ in range(num_rounds):
        number = number * 48271 % 2147483647
    return number


def rounds_per_ms() -> float:
    """Of this machine when it does nothing else; processor time, so that others do not count."""
    start_s = time.process_time()
    compute(1_000_000)
    return 1_000_000 / ((time.process_time() - start_s) * 1e3)


def plain_rate(num_processes: int) -> float:
    """How much processes that only compute get done per second, all together."""
    code = f"n = 1\nfor _ in range({PLAIN}): n = n * 48271 % 2147483647"
    start_s = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(num_processes)]
    for process in processes:
        process.wait()
    return num_processes / (time.perf_counter() - start_s)


async def play(player: EpisodeRunner, num_episodes: int) -> tuple[float, float]:
    """Episodes per second, and ms of this process' processor time per episode."""
    start_s, cpu_s = time.perf_counter(), time.process_time()
    played = await asyncio.gather(
        *(
            player.play(
                EpisodeRequest(
                    task=Task(id=str(i), data={}), seed=i, trajectory_id=f"t{i}", group_id="group"
                )
            )
            for i in range(num_episodes)
        )
    )
    assert all(t.reward == 1.0 and len(t.turns) == NUM_TURNS for t in played)
    cpu_ms = (time.process_time() - cpu_s) / num_episodes * 1e3
    return num_episodes / (time.perf_counter() - start_s), cpu_ms


async def measure(
    numbers: list[int], num_episodes: int, work_ms: float
) -> dict[str, dict[str, float]]:
    """Figures of this process ("here"), and of each number of workers."""
    config = load_config(
        overrides=[
            "cluster.address=local",
            f"cluster.rollout_workers={max(numbers)}",
            "trainer.runs_in=thread",
            f"rollout.max_in_flight={num_episodes}",
            "rollout.max_new_tokens=16",
            "rollout.episode_timeout_s=600",
        ]
    )
    envs = partial(Busy, round(work_ms * rounds_per_ms()))
    engine = ScriptedEngine(lambda question: "Far.")
    found: dict[str, dict[str, float]] = {}

    def keep(name: str, rate: float, cpu_ms: float, plain: float) -> None:
        row = found.setdefault(name, {})
        for key, value, better in (
            ("episodes_per_s", rate, max),
            ("cpu_ms_here", cpu_ms, min),
            ("plain_per_s", plain, max),
        ):
            row[key] = better(row.get(key, value), value)

    async with open_cluster(config) as cluster, EngineServer(engine) as server:
        assert cluster is not None
        setup = WorkerSetup(
            env_factory=envs,
            agent=ChatAgent(),
            open_engine=partial(
                SGLangEngine, Path("policy"), urls=[server.url], is_guest=True, max_context=4096
            ),
            open_renderer=byte_renderer,
            rollout=config.rollout,
        )
        here = LocalEpisodeRunner.for_training(
            EpisodeSetup(envs, ChatAgent(), engine, byte_renderer()), config.rollout
        )
        for _ in range(ROUNDS):
            keep("here", *await play(here, num_episodes), plain_rate(1))
            for number in numbers:
                workers = RolloutWorkers(cluster, setup, number)
                try:
                    await workers.start()
                    await play(workers, number)
                    keep(str(number), *await play(workers, num_episodes), plain_rate(number))
                finally:
                    await workers.aclose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--episodes", type=int, default=64, help="per round")
    parser.add_argument("--work", type=float, default=10.0, help="processor time per turn, ms")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    found = asyncio.run(measure(options.workers, options.episodes, options.work))
    first, last = (str(options.workers[i]) for i in (0, -1))
    ratio, plain = (
        found[last][key] / found[first][key] for key in ("episodes_per_s", "plain_per_s")
    )
    if options.json:
        rows = [{"where": where, **row} for where, row in found.items()]
        ratios = {"ratio": ratio, "plain_ratio": plain}
        print(json.dumps({"benchmark": "ray_rollout", "rows": rows, **ratios}))
        return
    print(f"{'played by':<20}{'episodes/s':>12}{'CPU ms here per episode':>26}")
    for where, row in found.items():
        name = "this process" if where == "here" else f"{where} worker(s)"
        print(f"{name:<20}{row['episodes_per_s']:>12.1f}{row['cpu_ms_here']:>26.2f}")
    print(f"{last} workers to {first}: {ratio:.2f} (plain processes: {plain:.2f})")


if __name__ == "__main__":
    main()
