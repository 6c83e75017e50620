"""What everything but the model costs: episodes against an instant scripted policy.

    python benchmarks/rollout.py [--json] [--episodes N]

CPU milliseconds are of the whole process, so they can be compared on a busy machine; wall-clock
rates cannot. Each row is the best of three rounds after one that warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.runs.speed import CALL, Sums
from areal_gym.utils.garbage import relax_garbage_collection

ROWS = (
    # name, turns, episodes in flight
    ("3 turns, about 400 tokens", 3, 128),
    ("20 turns, 1.2k sampled tokens", 20, 128),
    ("5-turn tool episodes", 5, 64),
    ("5-turn tool episodes", 5, 1024),
)


async def measure(num_turns: int, in_flight: int, num_episodes: int) -> dict[str, float]:
    engine = ScriptedEngine([CALL] * (num_turns - 1) + ["The answer is 7."])
    config = RolloutConfig(
        batch_groups=max(1, num_episodes // 8),
        group_size=8,
        max_in_flight=in_flight,
        max_new_tokens=256,
    )
    best: dict[str, float] = {}
    async with RolloutRunner(
        EpisodeSetup(Sums, ChatAgent(), engine, byte_renderer()), config
    ) as runner:
        for version in range(1, 5):
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            groups = await runner.next_batch()
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
            trajectories = [t for group in groups for t in group]
            assert all(t.reward == 1.0 and len(t.turns) == num_turns for t in trajectories)
            if version > 1 and cpu_s < best.get("cpu_s", float("inf")):
                best = {
                    "cpu_s": cpu_s,
                    "cpu_ms_per_episode": cpu_s / len(trajectories) * 1e3,
                    "episodes_per_cpu_s": len(trajectories) / cpu_s,
                    "episodes_per_s": len(trajectories) / wall_s,
                    "tokens_per_episode": len(trajectories[0].token_ids),
                    "sampled_tokens_per_episode": trajectories[0].num_policy_tokens,
                }
            await engine.publish([], version)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--episodes", type=int, default=2048, help="per round")
    options = parser.parse_args()
    relax_garbage_collection()  # as a run does
    rows = []
    for name, num_turns, in_flight in ROWS:
        numbers = asyncio.run(measure(num_turns, in_flight, options.episodes))
        rows.append({"name": name, "in_flight": in_flight, **numbers})
    if options.json:
        print(json.dumps({"benchmark": "rollout", "rows": rows}))
        return
    print(f"{'':<32}{'in flight':>10}{'tokens':>8}{'CPU ms':>8}{'per CPU-s':>11}{'per s':>8}")
    for row in rows:
        print(
            f"{row['name']:<32}{row['in_flight']:>10}{row['tokens_per_episode']:>8}"
            f"{row['cpu_ms_per_episode']:>8.3f}{row['episodes_per_cpu_s']:>11.0f}"
            f"{row['episodes_per_s']:>8.0f}"
        )


if __name__ == "__main__":
    main()
