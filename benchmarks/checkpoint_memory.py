"""Memory of ranks and driver while checkpoints are written and read, against a rank's shard.

    python benchmarks/checkpoint_memory.py [--millions 100] [--ranks 2] [--source bfloat16] [--json]

A model of the shape of Qwen3 on the CPU takes one step, is saved beside nothing, and is read again
by new ranks. Private memory (RssAnon, sampled every 5 ms) is that of each process; a shard is a
rank's part of weights and of both moments, 12 bytes a parameter. "saving" and "loading" are the
most that a process held above what it had before, and above what it has afterwards when reading.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from areal_gym.config import TrainerConfig
from areal_gym.models.hf.hf_loading import build_policy
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.checkpoint import require_whole, restore_trainer, save_trainer
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import FinishReason, Group, Task, TokenSpan, Trajectory, Turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--millions", type=int, default=100, help="of parameters, about")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--source", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        row = measure(
            Path(home), arguments.millions, arguments.ranks, getattr(torch, arguments.source)
        )
    if arguments.json:
        print(json.dumps({"benchmark": "checkpoint_memory", **row}))
        return
    for name, value in row.items():
        print(f"{name:<28}{value:>14,}")
    print("aim: ranks at 1.2 shards at most, the driver at the same for any size")


def measure(
    home: Path, millions: int, num_ranks: int, dtype: torch.dtype
) -> dict[str, float | int]:
    """Return the table's row; megabytes are 10^6 bytes."""
    num_parameters = write_policy(home / "policy", millions, dtype)
    config = TrainerConfig(num_ranks=num_ranks, lr=1e-5)
    shard_mb = 12 * num_parameters / num_ranks / 1e6
    row: dict[str, float | int] = {"parameters": num_parameters, "shard_mb": round(shard_mb)}
    trainer = ProcessTrainer(Trainer, home / "policy", config, advantage=grpo, loss=ppo_clip)
    try:
        trainer.step(groups(), 0)
        begin_s = time.perf_counter()
        with peaks(trainer) as saving:
            path = save_trainer(
                *(trainer, home / "checkpoints", 1, home / "policy"),
                on_copied=lambda: row.update(pause_s=round(time.perf_counter() - begin_s, 2)),
            )
        row["written_after_s"] = round(time.perf_counter() - begin_s, 2)
    finally:
        trainer.close()
    require_whole(path)
    row["checkpoint_mb"] = round(
        sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) / 1e6
    )
    trainer = ProcessTrainer(Trainer, path, config, advantage=grpo, loss=ppo_clip)
    try:
        with peaks(trainer) as loading:
            restore_trainer(trainer, path)
    finally:
        trainer.close()
    # Weights are there already when states begin to be read: they are a third of the shard.
    row["rank_saving_shards"] = round(max(saving[1:]) / shard_mb, 2)
    row["rank_loading_shards"] = round(max(loading[1:]) / shard_mb + 1 / 3, 2)
    row["driver_saving_mb"] = round(saving[0], 1)
    row["driver_loading_mb"] = round(loading[0], 1)
    return row


def write_policy(directory: Path, millions: int, dtype: torch.dtype) -> int:
    """Write a checkpoint of about that size; return its number of parameters."""
    width = 64 * round((millions * 1e6 / 110) ** 0.5 / 64)
    config = Qwen3Config(
        vocab_size=64 * round(millions * 5),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=6,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        tie_word_embeddings=True,
    )
    network = build_policy(config, seed=0).network.to(dtype)
    network.save_pretrained(directory, max_shard_size="100MB")
    return sum(p.numel() for p in network.parameters())


def groups() -> list[Group]:
    """One group of two short random trajectories."""
    rng = random.Random(0)
    prompt, *replies = (tuple(rng.randrange(10, 60) for _ in range(8)) for _ in range(3))
    task = Task(id="0", data={})
    members = []
    for number, reply in enumerate(replies):
        spans = (
            TokenSpan(origin="prompt", token_ids=prompt),
            TokenSpan(
                origin="policy", token_ids=reply, logprobs=(-6.0,) * len(reply), policy_version=0
            ),
        )
        turn = Turn(finish_reason=FinishReason.STOP, reward=float(number))
        members.append(
            Trajectory(
                id=str(number), group_id="0", task=task, env_id="b", spans=spans, turns=(turn,)
            )
        )
    return [Group(id="0", task=task, trajectories=tuple(members))]


@contextmanager
def peaks(trainer: ProcessTrainer) -> Iterator[list[float]]:
    """Yield what driver and ranks held at most in the block, above what they had before it."""
    pids = [os.getpid(), *(worker.process.pid for worker in trainer._workers)]
    before = [private_mb(pid) for pid in pids]
    most = [0.0 for _ in pids]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            for i, pid in enumerate(pids):
                most[i] = max(most[i], private_mb(pid) - before[i])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        is_over.set()
        watcher.join()


def private_mb(pid: int) -> float:
    """Return the memory of a process that no file backs, in 10^6 bytes."""
    with open(f"/proc/{pid}/status") as status:
        values: dict[str, Any] = dict(line.split(":", 1) for line in status)
    return int(values["RssAnon"].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    main()
