"""One GRPO step: 8 prompts x 8 siblings, a Qwen2 of 2M parameters, one thread.

    python benchmarks/grpo_step.py [--json]

Three cases, as a trainer meets them: 64 new tokens each; variable lengths with a mean of 15; a
tool environment of three turns. Lengths are forced, so that every step does the same work. Each
case runs in a process of its own, so that its peak memory is its own. The figures of TRL 1.16's
GRPOTrainer were measured elsewhere, on a loaded machine: read the ratios as an order of
magnitude, and the CPU seconds as what this machine needs. `trl_step.py` runs TRL itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import statistics
import time

import torch

from areal_gym.config import TrainerConfig
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.runs.speed import play_groups, shape
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.trainer import Trainer

CASES = {
    # name: (new tokens of each turn, tokens of a tool's reply, TRL's CPU-s, our aim)
    "64 tokens": (lambda rng: [64], 0, 2.3, 1.4),
    "mean of 15": (lambda rng: [min(64, 1 + int(rng.expovariate(1 / 14)))], 0, 2.1, 0.9),
    "three turns": (lambda rng: [64, 64, 64], 16, 17.2, 4.5),
}


def measure(name: str, num_steps: int) -> dict[str, object]:
    torch.set_num_threads(1)
    return asyncio.run(_measure(name, num_steps))


async def _measure(name: str, num_steps: int) -> dict[str, object]:
    turns_of, reply, trl, aim = CASES[name]
    decoder = build_decoder(shape("2M"), seed=0)
    learner = Trainer(decoder, TrainerConfig(lr=1e-5), advantage=grpo, loss=ppo_clip)
    engine = EmbeddedEngine(decoder, num_slots=64, max_context=768)
    await engine.start()
    rng = random.Random(0)
    spent, generating, tokens = [], [], 0
    for step in range(num_steps + 1):
        start = time.process_time()
        groups = await play_groups(engine, turns_of, rng, num_reply=reply)
        generated = time.process_time()
        learner.step(groups, step)
        await engine.publish(learner.weights(), step + 1)
        if step:  # the first one warms up
            spent.append(time.process_time() - start)
            generating.append(generated - start)
        tokens = sum(len(t.token_ids) for group in groups for t in group)
    await engine.aclose()
    median = statistics.median(spent)
    return {
        "case": name,
        "cpu_s": round(median, 3),
        "generation_cpu_s": round(statistics.median(generating), 3),
        "aim_cpu_s": aim,
        "trl_cpu_s": trl,
        "ratio_to_trl": round(trl / median, 2),
        "tokens": tokens,
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (name, arguments.steps)) for name in CASES]
    if arguments.json:
        print(json.dumps({"benchmark": "grpo_step", "rows": rows}))
        return
    print(f"{'case':<14}{'CPU-s':>8}{'of it gen.':>12}{'aim':>7}{'TRL':>7}{'ratio':>8}{'MB':>7}")
    for r in rows:
        print(
            f"{r['case']!s:<14}{r['cpu_s']:>8}{r['generation_cpu_s']:>12}{r['aim_cpu_s']:>7}"
            f"{r['trl_cpu_s']:>7}{r['ratio_to_trl']:>8}{r['peak_memory_mb']:>7}"
        )
    print(
        "TRL's figures (and 3.3 GB for three turns) were measured elsewhere; aim for memory: 1.1 GB"
    )


if __name__ == "__main__":
    main()
