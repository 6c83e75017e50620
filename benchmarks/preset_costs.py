"""What a step of each preset costs beside grpo's: CPU seconds of the trainer on the same batch.

    python benchmarks/preset_costs.py [--only clip_cov,gigpo] [--repeats 5] [--json]

8 prompts x 8 siblings of 24 tokens, a Qwen2 of 2M parameters, two updates a step, one thread; the
presets take turns, so that a busy machine is as busy for all. `step` is the median over grpo's.
Presets with a critic, a reference or a look at the whole update cost what those take, and `igpo`
the pass over each turn's prompt that scores the known answer, of three tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from areal_gym.config import TrainerConfig
from areal_gym.config.algorithm_settings import PRESETS
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.plugins import registry
from areal_gym.runs.speed import play_groups, shape
from areal_gym.trainer.algorithms.advantages import needs_answer_probs
from areal_gym.trainer.answer_probs import KnownAnswer, with_answer_probs
from areal_gym.trainer.objectives.distillation import PolicyTeacher
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Group


async def play() -> list[Group]:
    decoder = build_decoder(shape("2M"), seed=0)
    engine = EmbeddedEngine(decoder, num_slots=64, max_context=512)
    await engine.start()
    groups = await play_groups(engine, lambda rng: [24], random.Random(0))
    await engine.aclose()
    return list(groups)


def trainer(name: str, reference: Path) -> Trainer:
    config = TrainerConfig(algorithm=name, lr=1e-5, minibatches=2)
    plugins = registry()
    return Trainer(
        build_decoder(shape("2M"), seed=0),
        config,
        advantage=plugins.load("advantages", config.advantage),
        loss=plugins.load("losses", config.loss),
        max_new_tokens=24,
        reference=reference,
    )


def step(one: Trainer, groups: list[Group], *, scores_answer: bool) -> float:
    """Return the CPU seconds of a step."""
    start_s = time.process_time()
    if scores_answer:
        known = KnownAnswer(lead_ids=(), token_ids=(11, 12, 13))
        groups = asyncio.run(with_answer_probs(groups, PolicyTeacher(one), lambda task: known))
    one.step(groups, version=0)
    return time.process_time() - start_s


def step_costs(names: Sequence[str], repeats: int = 5) -> dict[str, float]:
    """Return the cost of each preset's step, grpo's being 1."""
    torch.set_num_threads(1)
    groups = asyncio.run(play())
    with tempfile.TemporaryDirectory() as home:
        policy = build_decoder(shape("2M"), seed=0)
        reference = save_checkpoint(policy, Path(home) / "policy", tokenizer_dir=Path(home))
        trainers = {name: trainer(name, reference) for name in dict.fromkeys(("grpo", *names))}
        spent: dict[str, list[float]] = {name: [] for name in trainers}
        for repeat in range(repeats + 1):
            for name, one in trainers.items():
                advantage = TrainerConfig(algorithm=name).advantage
                is_scored = needs_answer_probs(registry().load("advantages", advantage))
                cpu_s = step(one, groups, scores_answer=is_scored)
                if repeat:  # the first one warms up
                    spent[name].append(cpu_s)
    medians = {name: statistics.median(seconds) for name, seconds in spent.items()}
    return {name: medians[name] / medians["grpo"] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PRESETS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs = step_costs(options.only.split(","), options.repeats)
    if options.json:
        print(json.dumps({"benchmark": "preset_costs", "step": costs}))
        return
    for name, cost in costs.items():
        print(f"{name:<24}{cost:.2f}")


if __name__ == "__main__":
    main()
