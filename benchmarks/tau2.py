"""What tau2 episodes cost besides the policy: `python benchmarks/tau2.py [--json]`.

Whole episodes of the train split with the gold policy and the rule-based user, by `TextEnv.reset`
and `astep`, in one process and one thread. Retail, airline and telecom need the benchmark's data
(TAU2_DATA_DIR, or `areal-gym data pull tau2`).

    load    CPU s to parse data and tasks, once per process
    first   CPU ms of an episode whose task is played for the first time in the process
    1, 64, 1024   CPU ms of an episode later on, so many in flight
    step    CPU ms of a step with 64 in flight
    KB      of memory for one more episode in flight
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import areal_gym
from areal_gym.envs.base import TextEnv
from areal_gym.errors import DataError
from areal_gym.utils.statistics import rss_mb

DOMAINS = ("mock", "retail", "airline", "telecom")
AIM_MS = {"retail": 2.0, "airline": 2.0, "telecom": 5.0}


async def play_all(domain: str, num_episodes: int, num_in_flight: int) -> tuple[int, float]:
    """The number of steps, and the memory that the episodes in flight hold."""
    num_steps = 0
    before_mb = rss_mb() or 0.0
    indexes = iter(range(num_episodes))
    envs = [areal_gym.make(f"tau2/{domain}") for _ in range(num_in_flight)]
    num_tasks = envs[0].num_tasks("train") or num_episodes

    async def work(env: TextEnv) -> None:
        nonlocal num_steps
        for index in indexes:
            env.reset(options={"split": "train", "index": index % num_tasks})
            is_over = False
            while not is_over:
                step = await env.astep(env.gold_action())
                num_steps += 1
                is_over = step.terminated or step.truncated
                await asyncio.sleep(0)
            assert step.reward == 1.0, env.task.id

    await asyncio.gather(*(work(env) for env in envs))
    return num_steps, (rss_mb() or 0.0) - before_mb


def measure(domain: str, num_episodes: int) -> dict[str, Any]:
    start = time.process_time()
    env = areal_gym.make(f"tau2/{domain}")
    row: dict[str, Any] = {"domain": domain, "load_s": time.process_time() - start}
    num_tasks = env.num_tasks("train") or num_episodes
    for name, num, num_in_flight in (
        ("first_ms", num_tasks, 1),
        ("1", num_episodes, 1),
        ("64", num_episodes, 64),
        ("1024", num_episodes, 1024),
    ):
        start = time.process_time()
        num_steps, grown_mb = asyncio.run(play_all(domain, num, num_in_flight))
        spent_s = time.process_time() - start
        row[name] = 1e3 * spent_s / num
        if num_in_flight == 64:
            row["step_ms"] = 1e3 * spent_s / num_steps
    row["memory_kb"] = 1e3 * grown_mb / num_in_flight
    row["rss_mb"] = rss_mb()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--episodes", type=int, default=2048)
    arguments = parser.parse_args()
    rows = []
    for domain in DOMAINS:
        try:
            rows.append(measure(domain, arguments.episodes))
        except DataError as error:
            print(f"{domain}: left out: {error}")
    if arguments.json:
        print(json.dumps({"benchmark": "tau2", "rows": rows, "aim_ms": AIM_MS}))
        return
    print(
        f"{'':10}{'load s':>8}{'first':>8}{'1':>8}{'64':>8}{'1024':>8}{'step':>8}{'KB':>8}"
        f"{'MB in all':>11}{'aim ms':>8}"
    )
    for row in rows:
        print(
            f"{row['domain']:10}{row['load_s']:8.2f}{row['first_ms']:8.2f}{row['1']:8.2f}"
            f"{row['64']:8.2f}{row['1024']:8.2f}{row['step_ms']:8.2f}{row['memory_kb']:8.0f}"
            f"{row['rss_mb']:11.0f}{AIM_MS.get(row['domain'], 0.0) or '':>8}"
        )


if __name__ == "__main__":
    main()
