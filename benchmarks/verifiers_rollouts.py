"""Rollouts of an environment of verifiers behind the gateway, one at a time and several.

    AREAL_GYM_VERIFIERS_PYTHON=PYTHON python benchmarks/verifiers_rollouts.py ID [--rollouts 40]

The policy is scripted, so what is measured is verifiers, its worker process and the gateway. The
in-process harness of 0.4 is used; the first rollouts, which import and connect, are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

from areal_gym.agents.chat import ChatAgent
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.verifiers.verifiers_env import VerifiersEnv
from areal_gym.rollout.episode import play_episode


async def measure(id: str, num_rollouts: int, together: int) -> dict[str, float]:
    """Return the seconds of rollouts, `together` at a time, and the processor time of this side."""
    engine = ScriptedEngine(lambda _: "2")
    slots = asyncio.Semaphore(together)
    times: list[float] = []

    async def rollout(number: int) -> None:
        async with slots:
            env = VerifiersEnv(id)
            start_s = time.perf_counter()
            trajectory = await play_episode(
                env,
                ChatAgent(),
                engine,
                byte_renderer(),
                options={"split": "train", "index": number % 4},
                params=SamplingParams(max_new_tokens=100),
                timeout_s=90,
            )
            times.append(time.perf_counter() - start_s)
            assert trajectory.error is None, trajectory.error
            await env.aclose()

    for number in range(3):
        await rollout(number)
    times.clear()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(rollout, range(num_rollouts)))
    return {
        "together": together,
        "median_s": round(statistics.median(times), 4),
        "min_s": round(min(times), 4),
        "own_cpu_s": round((time.process_time() - cpu_s) / num_rollouts, 4),
        "rollouts_a_second": round(num_rollouts / (time.perf_counter() - start_s), 1),
    }


def main() -> None:
    """Measure and print a line of JSON for each crowd."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("id", help="an environment that the worker's Python has")
    parser.add_argument("--rollouts", type=int, default=40)
    options = parser.parse_args()
    for together in (1, 8):
        print(json.dumps(asyncio.run(measure(options.id, options.rollouts, together))))


if __name__ == "__main__":
    main()
