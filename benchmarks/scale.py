"""Ten thousand episodes in flight in one process: memory for each, and the event loop's lag.

    python benchmarks/scale.py [--json] [--episodes N] [--seconds S] [--turn-s S ...]

Five-turn tool episodes against a scripted policy whose turns take a random time, exponential with
the mean `--turn-s` (at least 0.2 s, at most five times the mean). So many episodes against a
quicker policy are more turns a second, until the loop has no time left: `cpu_share` says how full
it is. `start_s` are the seconds until all of them wait for the policy; then they play on for a
while, and are measured.

`held` are the episodes in memory: those in flight, and those that wait for their siblings or for
the trainer. `kb_per_episode` is resident memory, over what the process had before, for each of
these; `of_it_tokens_kb` is what their token ids and log-probabilities weigh by themselves.

The lag is asked every 5 ms, on schedule: while something keeps the loop for a second, 200 questions
go unanswered, and all of them count.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.scripted import Question, ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.tools import tool
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.types import Message, Task, TokenSpan, text_of
from areal_gym.utils.garbage import relax_garbage_collection

CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
NUM_TURNS = 5
GROUP_SIZE = 8
BATCH_GROUPS = 128
ROUNDS_AHEAD = 32
TURN_S = (2.0, 3.0, 5.0)
TICK_S = 0.005


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Sums(TextEnv):
    """Tool calls, then an answer."""

    tools = (add,)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        number = int(rng.integers(10**9))
        return Task(id=str(number), data={"number": number})

    def first_messages(self, task: Task) -> Sequence[Message]:
        return [{"role": "user", "content": f"What is {task.data['number']} + 7?"}]

    async def respond(self, message: Message) -> Response:
        if message.get("tool_calls"):
            results = await self.call_tools(message)
            for result in results.messages:
                number = self.task.data["number"] + self.num_turns
                result["content"] = f"{text_of(result['content'])} and {number}"
            return Response(messages=results.messages)
        return Response(reward=1.0, is_terminated=True)


class Lag:
    """How late the event loop would answer a question, asked at any moment."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        asked_s = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            since_s = time.perf_counter() - asked_s
            asked_s += since_s
            late_s = since_s - TICK_S
            num_late = max(0, round(late_s / TICK_S))
            self._late_s += [late_s - i * TICK_S for i in range(num_late)]
            self._late_s += [max(0.0, late_s)] * (num_late == 0)

    def take(self, name: str) -> dict[str, float]:
        """Percentiles in ms since the last call."""
        late_s, self._late_s = sorted(self._late_s) or [0.0], []
        return {
            f"{name}_lag_p50_ms": late_s[len(late_s) // 2] * 1e3,
            f"{name}_lag_p99_ms": late_s[int(0.99 * len(late_s))] * 1e3,
            f"{name}_lag_max_ms": late_s[-1] * 1e3,
        }

    def stop(self) -> None:
        self._task.cancel()


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS")


def token_bytes() -> int:
    """What the ids and log-probabilities of all recorded spans weigh, 8 bytes each.

    A real policy's are objects of their own: 32 bytes more for an id above 256, 24 for a
    log-probability.
    """
    spans = [found for found in gc.get_objects() if isinstance(found, TokenSpan)]
    return 8 * sum(len(span) + len(span.logprobs or ()) for span in spans)


async def measure(num_episodes: int, seconds: float, turn_s: float) -> dict[str, float]:
    rng = random.Random(0)

    def latency_s(question: Question) -> float:
        return min(5 * turn_s, max(0.2, rng.expovariate(1 / turn_s)))

    engine = ScriptedEngine([CALL] * (NUM_TURNS - 1) + ["The answer is 7."], latency_s=latency_s)
    config = RolloutConfig(
        batch_groups=BATCH_GROUPS,
        group_size=GROUP_SIZE,
        max_in_flight=num_episodes,
        max_staleness=ROUNDS_AHEAD,
        max_new_tokens=256,
    )
    gc.collect()
    before = resident_bytes()
    num_done = 0
    async with RolloutRunner(
        EpisodeSetup(Sums, ChatAgent(), engine, byte_renderer()), config
    ) as runner:

        async def train() -> None:
            nonlocal num_done
            for version in range(1, 1_000_000):
                num_done += sum(map(len, await runner.next_batch()))
                await engine.publish([], version)

        lag = Lag()
        start_s = time.perf_counter()
        trainer = asyncio.create_task(train())
        while runner.in_flight.engine < 0.99 * num_episodes:
            await asyncio.sleep(0.01)
        numbers = {"start_s": time.perf_counter() - start_s, **lag.take("start")}
        await asyncio.sleep(NUM_TURNS * turn_s)  # until episodes are at all turns
        lag.take("mix")
        cpu_s, wall_s, done = time.process_time(), time.perf_counter(), num_done
        await asyncio.sleep(seconds)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        numbers |= lag.take("steady")
        stats = runner.stats()
        numbers["in_flight"] = stats.episodes_in_flight
        numbers["episodes_per_s"] = (num_done - done) / wall_s
        numbers["cpu_share"] = cpu_s / wall_s
        kb = (resident_bytes() - before) / 1e3
        num_groups = stats.groups_running + stats.groups_ready
        numbers["held"] = num_groups * GROUP_SIZE - stats.episodes_queued
        numbers["kb_per_episode"] = kb / numbers["held"]
        numbers["of_it_tokens_kb"] = token_bytes() / 1e3 / numbers["held"]
        numbers["kb_per_episode_in_flight"] = kb / stats.episodes_in_flight
        lag.stop()
        trainer.cancel()
        await asyncio.gather(trainer, return_exceptions=True)
    return numbers


def measure_alone(num_episodes: int, seconds: float, turn_s: float) -> dict[str, float]:
    relax_garbage_collection()  # as a run does
    return asyncio.run(measure(num_episodes, seconds, turn_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--episodes", type=int, default=10_000, help="in flight")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, once all play")
    parser.add_argument(
        "--turn-s", type=float, nargs="+", default=TURN_S, help="the policy's mean, each measured"
    )
    options = parser.parse_args()
    rows = []
    for turn_s in options.turn_s:
        # A process of its own: memory that others have used would hide what this needs.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            measured = pool.submit(measure_alone, options.episodes, options.seconds, turn_s)
            rows.append({"turn_s": turn_s, **measured.result()})
    if options.json:
        print(json.dumps({"benchmark": "scale", "rows": rows}))
        return
    for name in rows[0]:
        print(f"{name:26}" + "".join(f"{row[name]:12.2f}" for row in rows))


if __name__ == "__main__":
    main()
