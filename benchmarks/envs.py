"""How fast environments step: `python benchmarks/envs.py [--json]`.

Five-turn tool episodes with a scripted policy, everything in one process and one thread:

    bare       TextEnv.astep alone: calls parsed, tool run, messages kept
    recorded   through play_episode: bytes rendered and bridged, spans, a whole Trajectory each

and `tir` with its real sandbox, a fresh interpreter per call or one per episode. CPU time is that
of this process; the sandbox's processes are its children and show in the wall time only.

With `--gold`: every built-in environment, played by its own gold policy, with 1, 64 and 1,024
episodes in flight, and the resident memory that this adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import areal_gym
from areal_gym.agents.chat import ChatAgent
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.tir import TirEnv, python_call, tir_tasks
from areal_gym.envs.tools import tool
from areal_gym.metrics import rss_mb
from areal_gym.rollout.episode import play_episode

NUM_TURNS = 5
REPLIES = [python_call("37*48+12")] * (NUM_TURNS - 1) + [r"The result is \boxed{1788}"]


@tool
def python(code: str) -> str:
    """Do next to nothing: the path to a tool and back is what is measured."""
    return str(len(code))


class ToolEnv(TextEnv):
    """Four tool calls, then an answer; the tool is a function of this process."""

    tools = (python,)
    max_turns = NUM_TURNS

    def sample_task(self, rng, options):
        return tir_tasks(2).draw(rng, "train")

    def first_messages(self, task):
        return [{"role": "user", "content": task.data["question"]}]

    async def respond(self, message):
        if message.get("tool_calls"):
            results = await self.call_tools(message)
            return Response(messages=results.messages, metrics={"tool_calls": results.num_calls})
        return Response(reward=1.0, is_terminated=True)


async def bare(num_episodes: int, num_in_flight: int) -> None:
    for first in range(0, num_episodes, num_in_flight):
        envs = [ToolEnv() for _ in range(min(num_in_flight, num_episodes - first))]
        for seed, env in enumerate(envs, first):
            env.reset(seed=seed)
        for reply in REPLIES:
            results = [await env.astep(reply) for env in envs]
        assert all(result.terminated for result in results)
        assert all(len(env.messages) == 2 * NUM_TURNS for env in envs)


async def recorded(num_episodes: int, num_in_flight: int) -> None:
    engine, renderer, agent = ScriptedEngine(REPLIES), byte_renderer(), ChatAgent()
    params = SamplingParams(max_new_tokens=256)
    seeds = iter(range(num_episodes))

    async def play_on() -> None:
        env = ToolEnv()
        for seed in seeds:
            trajectory = await play_episode(
                env, agent, engine, renderer, seed=seed, params=params, env_id="tool"
            )
            assert trajectory.reward == 1.0
            assert len(trajectory.turns) == NUM_TURNS

    await asyncio.gather(*(play_on() for _ in range(num_in_flight)))


async def tir(num_episodes: int, num_in_flight: int, *, stateful: bool) -> None:
    seeds = iter(range(num_episodes))

    async def play_on() -> None:
        env = TirEnv(stateful=stateful)
        for seed in seeds:
            env.reset(seed=seed)
            await env.astep(env.gold_action())
            result = await env.astep(env.gold_action())
            assert result.reward == 1.0

    await asyncio.gather(*(play_on() for _ in range(num_in_flight)))


async def gold(num_episodes: int, num_in_flight: int, *, env_id: str) -> None:
    seeds = iter(range(num_episodes))
    envs = [areal_gym.make(env_id) for _ in range(num_in_flight)]

    async def play_on(env: TextEnv) -> None:
        for seed in seeds:
            env.reset(seed=seed)
            is_over = False
            while not is_over:
                result = await env.astep(env.gold_action())
                is_over = result.terminated or result.truncated
        await env.aclose()

    await asyncio.gather(*map(play_on, envs))


def measure_gold(num_episodes: int) -> list[dict[str, Any]]:
    rows = []
    for env_id in ("math", "countdown", "code", "search", "tir", "tau2/mock", "mix"):
        for num_in_flight in (1, 64, 1024):
            before_mb = rss_mb()
            num = max(num_episodes, num_in_flight)
            run = partial(gold, env_id=env_id)
            rows.append(measure(env_id, run, num, num_in_flight, num_runs=1))
            rows[-1]["added_mb"] = rss_mb() - before_mb
    return rows


def measure(
    name: str,
    run: Callable[[int, int], Awaitable[None]],
    num_episodes: int,
    num_in_flight: int,
    num_runs: int = 3,
) -> dict[str, Any]:
    """The best of the runs, each after a short one to warm up."""

    async def timed() -> tuple[float, float]:
        await run(min(64, num_episodes), min(64, num_in_flight))
        wall, cpu = time.perf_counter(), time.process_time()
        await run(num_episodes, num_in_flight)
        return time.perf_counter() - wall, time.process_time() - cpu

    runs = [asyncio.run(timed()) for _ in range(num_runs)]
    wall_s, cpu_s = min(run[0] for run in runs), min(run[1] for run in runs)
    return {
        "name": name,
        "num_in_flight": num_in_flight,
        "num_episodes": num_episodes,
        "episodes_per_s": num_episodes / wall_s,
        "cpu_ms_per_episode": 1e3 * cpu_s / num_episodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--episodes", type=int, default=4096, help="of the in-memory environment")
    parser.add_argument("--gold", action="store_true", help="every environment's gold policy")
    arguments = parser.parse_args()
    if arguments.gold:
        rows = measure_gold(min(arguments.episodes, 512))
        if arguments.json:
            print(json.dumps({"benchmark": "envs, gold", "rows": rows}))
            return
        print(f"{'':12}{'in flight':>10}{'episodes/s':>12}{'CPU ms each':>13}{'added MB':>10}")
        for row in rows:
            print(
                f"{row['name']:12}{row['num_in_flight']:10}{row['episodes_per_s']:12,.0f}"
                f"{row['cpu_ms_per_episode']:13.3f}{row['added_mb']:10.1f}"
            )
        return
    num = arguments.episodes
    rows = [measure("bare", bare, num, k) for k in (64, 1024)]
    rows += [measure("recorded", recorded, num, k) for k in (64, 1024)]
    for name, stateful in (("tir, fresh interpreters", False), ("tir, one per episode", True)):
        rows.append(measure(name, lambda n, k, s=stateful: tir(n, k, stateful=s), 512, 64))
    aim = {"episodes_per_s": 3000, "cpu_ms_per_episode": 0.3}
    if arguments.json:
        print(json.dumps({"benchmark": "envs", "rows": rows, "aim_in_memory": aim}))
        return
    print(f"{'':26}{'in flight':>10}{'episodes/s':>12}{'CPU ms each':>13}")
    for row in rows:
        print(
            f"{row['name']:26}{row['num_in_flight']:10}{row['episodes_per_s']:12,.0f}"
            f"{row['cpu_ms_per_episode']:13.3f}"
        )
    print("aim, in memory: at least 3,000 episodes/s, at most 0.3 CPU ms each")


if __name__ == "__main__":
    main()
