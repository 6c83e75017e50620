"""How long training waits for a checkpoint: the pause of the loop, as a share of a training step.

    python benchmarks/checkpoint.py [--rounds 5] [--json]

Two models on the CPU, one thread: of the starter policy's shape, and of 20M parameters. A step is
`Trainer.step` alone, without rollouts, on 8 groups of 8; both it and the pause (`Saver.save`) are
wall-clock time, medians over the rounds. A round is a step with the disk at rest, a save, a step
while that is being written, and the wait for its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from areal_gym.config import TrainerConfig
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.saving import Saver
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.checkpoint import keep_checkpoints
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import FinishReason, Group, Task, TokenSpan, Trajectory, Turn
from areal_gym.warm_start.starter_policy import Recipe

NUM_GROUPS, GROUP_SIZE, PROMPT, REPLY = 8, 8, 40, 40


def starter() -> DecoderConfig:
    recipe = Recipe()
    return DecoderConfig(
        architecture="qwen3",
        vocab_size=500,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.ffn_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_context,
        tie_word_embeddings=True,
    )


def larger() -> DecoderConfig:
    return DecoderConfig(
        architecture="qwen3",
        vocab_size=12_000,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


MODELS = {"starter": starter, "20M": larger}


def batch(rng: random.Random) -> list[Group]:
    """Random tokens that are as likely as random tokens are."""

    def trajectory(group: int, prompt: tuple[int, ...], number: int) -> Trajectory:
        reply = tuple(rng.randrange(10, 500) for _ in range(rng.randint(1, 2 * REPLY)))
        spans = (
            TokenSpan(origin="prompt", token_ids=prompt),
            TokenSpan(
                origin="policy",
                token_ids=reply,
                logprobs=tuple(-6.0 for _ in reply),
                policy_version=0,
            ),
        )
        return Trajectory(
            id=f"{group}-{number}",
            group_id=str(group),
            task=Task(id=str(group), data={}),
            env_id="benchmark",
            spans=spans,
            turns=(Turn(finish_reason=FinishReason.STOP, reward=float(number % 2)),),
        )

    groups = []
    for g in range(NUM_GROUPS):
        prompt = tuple(rng.randrange(10, 500) for _ in range(PROMPT))
        members = tuple(trajectory(g, prompt, i) for i in range(GROUP_SIZE))
        groups.append(Group(id=str(g), task=members[0].task, trajectories=members))
    return groups


async def measure(name: str, num_rounds: int, home: Path) -> dict[str, float | str]:
    decoder = build_decoder(MODELS[name](), seed=0)
    learner = Trainer(decoder, TrainerConfig(lr=1e-5), advantage=grpo, loss=ppo_clip)
    rng = random.Random(0)
    learner.step(batch(rng), 0)
    run = RunDir(home / name)
    saver = Saver(
        learner,
        run,
        home,
        dict,
        on_saved=lambda step, state: None,
        delete_old=lambda: keep_checkpoints(run.checkpoints_dir, 2, {}),
    )
    alone, pauses, beside, written = [], [], [], []
    for number in range(1, num_rounds + 1):
        groups = batch(rng)
        times = [time.perf_counter()]
        learner.step(groups, 0)
        times.append(time.perf_counter())
        await saver.save(number)
        times.append(time.perf_counter())
        learner.step(groups, 0)
        times.append(time.perf_counter())
        saver.save_now(number)
        alone.append(times[1] - times[0])
        pauses.append(times[2] - times[1])
        beside.append(times[3] - times[2])
        written.append(time.perf_counter() - times[1])
    saver.close()
    step_s = statistics.median(alone)
    return {
        "model": name,
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "step_s": round(step_s, 4),
        "pause_s": round(statistics.median(pauses), 4),
        "pause_per_step": round(statistics.median(pauses) / step_s, 3),
        "step_while_writing": round(statistics.median(beside) / step_s, 2),
        "written_after_s": round(statistics.median(written), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        rows = [asyncio.run(measure(name, arguments.rounds, Path(home))) for name in MODELS]
    if arguments.json:
        print(json.dumps({"benchmark": "checkpoint", "rows": rows}))
        return
    print(f"{'model':<10}{'parameters':>12}{'step':>9}{'pause':>9}{'pause/step':>12}", end="")
    print(f"{'step beside it':>16}{'on the disk':>13}")
    for row in rows:
        print(
            f"{row['model']:<10}{row['parameters']:>12,}{row['step_s']:>7.2f} s"
            f"{row['pause_s']:>7.3f} s{row['pause_per_step']:>12.1%}"
            f"{row['step_while_writing']:>15}x{row['written_after_s']:>11.2f} s"
        )
    print("aim: a pause under 10% of a step")


if __name__ == "__main__":
    main()
