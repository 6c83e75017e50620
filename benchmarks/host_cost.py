"""The host's work of one step, without a model pass: CPU-seconds per million tokens, by part.

    python benchmarks/host_cost.py [--sequences 512] [--ranks 2] [--json]

A step of 512 sequences of 16,384 tokens in groups of 16, each with a prompt that siblings share and
four turns. The parts: servers' answers become token spans; the batch is passed to the ranks;
ranks make sequences, columns and advantages, and pack micro-batches; trained tokens and
trajectories are written; the journal keeps the groups.

Then all of it happens at once beside an event loop that should never stand still: `longest block`
is the longest time for which the loop answered nobody, as in a run whose writer is at work; waiting
for a core that another process has does not count. The
aims are 1 CPU-second per million tokens in all, and 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from areal_gym.chat import Prompt
from areal_gym.config import TrainerConfig
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.servers.replies import Reply
from areal_gym.engines.sglang.sglang_client import SGLangClient
from areal_gym.engines.sglang.sglang_replies import read_answer
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.recording.recorder import Recorder
from areal_gym.rollout.journal import BackgroundJournal, Journal
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.speed import shape
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.chunked_logprobs import places_before
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.step_stats import Step
from areal_gym.trainer.trainer import Trainer
from areal_gym.trainer.update import TrainerThread
from areal_gym.types import FinishReason, Group, Message, Task, Trajectory, Turn
from areal_gym.utils.background_writer import BackgroundWriter
from areal_gym.utils.garbage import relax_garbage_collection

GROUP_SIZE = 16
NUM_TURNS = 4
PROMPT, REPLY, SAMPLED = 1024, 256, 3584
SEQUENCE = PROMPT + NUM_TURNS * (REPLY + SAMPLED)
VOCABULARY = 150_000
AIM_CPU_S, AIM_BLOCK_MS = 1.0, 50.0

TICK_S = 0.001


class HostTrainer(Trainer):
    """A trainer that does all of a step but the model's passes."""

    def _update(self, step: Step, members: list[int], *, is_first: bool) -> float:
        for batch, indexes, is_mine in self._passes.microbatches(step.rows, members):
            places_before(batch, [step.rows[i].loss_mask for i in indexes])
            old_T = step.columns.take("old", indexes)
            step.columns.take("advantages", indexes)
            step.columns.row_ids(indexes)
            if is_mine:
                step.add(
                    batch,
                    indexes,
                    old_T,
                    {"approx_kl": old_T},
                    num_tokens=len(old_T),
                    is_first=is_first,
                )
        step.end_update(self._ranks)
        step.lr_scales.append(1.0)
        return 1.0


def answer_body(rng: np.random.Generator) -> bytes:
    """Return what an SGLang server answers with for one turn."""
    ids = rng.integers(VOCABULARY, size=SAMPLED).tolist()
    # A server's log-probabilities are float32, and JSON has all of their digits.
    logprobs = (-rng.exponential(size=SAMPLED)).astype(np.float32).tolist()
    meta = {
        "id": "0",
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": 1,
        "completion_tokens": SAMPLED,
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": SAMPLED}],
        "input_token_logprobs": [],
        "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, ids, strict=True)],
    }
    # As compact as SGLang writes it.
    return orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})


class Sequences:
    """Makes the groups of a step from servers' answers, of which it keeps a few."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._rng = random.Random(0)
        self._bodies = [answer_body(rng) for _ in range(16)]
        self._replies = [tuple(rng.integers(VOCABULARY, size=REPLY).tolist()) for _ in range(16)]
        self._prompts = [tuple(rng.integers(VOCABULARY, size=PROMPT).tolist()) for _ in range(16)]
        self._client = SGLangClient("http://127.0.0.1:1")
        self._engine = ScriptedEngine([])
        self._text = "word " * SAMPLED

    def episode(self, group: int, member: int) -> Generator[None, None, Trajectory]:
        """Read the answers to the turns of one episode, and record them; pause after each turn."""
        recorder = Recorder(self._engine, None, SamplingParams())  # type: ignore[arg-type]
        prompt = self._prompts[group % len(self._prompts)]
        ids: list[int] = []
        messages: list[Message] = [{"role": "user", "content": "word " * PROMPT}]
        for turn in range(NUM_TURNS):
            added = (prompt if turn == 0 else ()) + self._rng.choice(self._replies)
            body = self._rng.choice(self._bodies)
            answer = self._client._read("/generate", 200, "application/json", body)
            draft = Reply()
            draft.add(read_answer(answer, 3))
            generation = draft.generation(FinishReason.STOP)
            recorder._keep(Prompt((*ids, *added), added, 0, []), generation, 0, 1.0)
            ids += (*added, *generation.token_ids)  # as `Dialogue.answer` does
            messages.append({"role": "assistant", "content": self._text})
            yield
        return Trajectory(
            id=f"{group}/{member}",
            group_id=str(group),
            task=Task(id=str(group), data={"question": "?"}),
            env_id="host",
            spans=tuple(recorder._spans),
            turns=tuple(
                Turn(finish_reason=FinishReason.STOP, reward=(member % 2) / NUM_TURNS)
                for _ in range(NUM_TURNS)
            ),
            messages=tuple(messages),
        )

    def group(self, index: int) -> Group:
        """Make one group."""
        members = []
        for member in range(GROUP_SIZE):
            episode = self.episode(index, member)
            while (trajectory := next_turn(episode)) is None:
                pass
            members.append(trajectory)
        return Group(id=str(index), task=members[0].task, trajectories=tuple(members))


def next_turn(episode: Generator[None, None, Trajectory]) -> Trajectory | None:
    """Take a turn; return the trajectory when the episode has ended."""
    try:
        next(episode)
    except StopIteration as end:
        trajectory: Trajectory = end.value
        return trajectory
    return None


def rank_seconds(trainer: ProcessTrainer) -> float:
    """Return the CPU seconds that all ranks have spent."""
    spent = 0.0
    for worker in trainer._workers:
        stat = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
        spent += (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def make_trainer(directory: Path, num_ranks: int) -> ProcessTrainer:
    """Start the ranks, which must find the trainer's class by the name of this module."""
    policy = directory / "policy"
    save_checkpoint(build_decoder(shape("0.4M"), seed=0), policy)
    config = TrainerConfig(num_ranks=num_ranks, tokens_per_microbatch=2 * SEQUENCE)
    kind = importlib.import_module(Path(__file__).stem).HostTrainer
    return ProcessTrainer(kind, policy, config, advantage=grpo, loss=ppo_clip)


def save(run: RunDir, step: int, trained: Sequence[Mapping[str, Any]], batch: list[Group]) -> None:
    run.save_trained(trained, step=step)
    run.save_trajectories((t for group in batch for t in group), name=step)


def measure_parts(num_groups: int, trainer: ProcessTrainer, run: RunDir) -> dict[str, float]:
    """Return the CPU seconds of each part, one after the other."""
    parts: dict[str, float] = {}

    def spent() -> float:
        return time.process_time() + rank_seconds(trainer)

    source = Sequences()
    before = spent()
    groups = [source.group(index) for index in range(num_groups)]
    parts["answers to spans"] = spent() - before
    before = spent()
    with Journal(run.journal_file) as journal:
        for index, group in enumerate(groups):
            journal.issued(index, {})
            journal.scored(index, group)
        journal.checkpoint({"next_group": num_groups // 2, "unfinished": []})
    parts["journal"] = spent() - before
    before, before_ranks = spent(), rank_seconds(trainer)
    trainer.step(groups, 3)
    parts["ranks: columns, advantages, packing"] = rank_seconds(trainer) - before_ranks
    parts["batch to ranks"] = spent() - before - parts["ranks: columns, advantages, packing"]
    before = spent()
    save(run, 1, trainer.trained_tokens(), groups)
    parts["trained tokens and trajectories"] = spent() - before
    return parts


async def longest_block_s(num_groups: int, trainer: ProcessTrainer, run: RunDir) -> float:
    """Return for how long the loop answered nobody, while all of it goes on beside it."""
    source, longest, is_over = Sequences(), 0.0, False
    thread, writer = TrainerThread(), BackgroundWriter("trajectories")

    async def tick() -> None:
        nonlocal longest
        while not is_over:
            before, cpu_before = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK_S)
            gap = time.perf_counter() - before - TICK_S
            # While other processes have the cores, this one cannot answer either.
            longest = max(longest, min(gap, time.process_time() - cpu_before))

    ticking = asyncio.create_task(tick())
    with BackgroundJournal(run.journal_file) as journal:
        training: asyncio.Future[Any] | None = None
        for step in (2, 3, 4):
            groups = []
            for index in range(num_groups):
                members = []
                for member in range(GROUP_SIZE):
                    episode = source.episode(index, member)
                    while (trajectory := next_turn(episode)) is None:
                        await asyncio.sleep(0)  # the next turn's answer comes in its own time
                    members.append(trajectory)
                task = members[0].task
                groups.append(Group(id=str(index), task=task, trajectories=tuple(members)))
                journal.scored((step - 2) * num_groups + index, groups[-1])
            if training is not None:
                await training
            training = asyncio.ensure_future(_train(thread, writer, trainer, run, step, groups))
            journal.checkpoint({"next_group": (step - 2) * num_groups, "unfinished": []})
        if training is not None:
            await training
        await asyncio.to_thread(writer.finish)
        await asyncio.to_thread(journal.finish)
    is_over = True
    await ticking
    writer.close()
    thread.close()
    return longest


async def _train(
    thread: TrainerThread,
    writer: BackgroundWriter,
    trainer: ProcessTrainer,
    run: RunDir,
    step: int,
    groups: list[Group],
) -> None:
    await thread.call(trainer.step, groups, step)
    trained = await thread.call(trainer.trained_tokens)
    await writer.write(partial(save, run, step, trained, groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=512, help="of a step, in groups of 16")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    num_groups = max(1, options.sequences // GROUP_SIZE)
    num_tokens = num_groups * GROUP_SIZE * SEQUENCE
    relax_garbage_collection()  # as a run does
    with tempfile.TemporaryDirectory() as home:
        directory = Path(home)
        trainer, run = make_trainer(directory, options.ranks), RunDir(directory / "run")
        try:
            parts = measure_parts(num_groups, trainer, run)
            files = (*run.trajectories_dir.iterdir(), *run.trained_dir.iterdir())
            num_bytes = sum(file.stat().st_size for file in files)
            probe_groups = max(1, num_groups // 4)
            block_s = asyncio.run(longest_block_s(probe_groups, trainer, run))
        finally:
            trainer.close()
    rows = {name: spent / num_tokens * 1e6 for name, spent in parts.items()}
    total, block_ms = sum(rows.values()), block_s * 1e3
    if options.json:
        result = {"tokens": num_tokens, "ranks": options.ranks, "cpu_s_per_million": rows}
        result |= {"sum": total, "longest_block_ms": block_ms}
        print(json.dumps({"benchmark": "host_cost", **result}))
        return
    print(f"{num_tokens:,} tokens, {options.ranks} ranks{'CPU-s per million':>40}")
    for name, value in rows.items():
        print(f"{name:44}{value:16.3f}")
    print(f"{'sum':44}{total:16.3f}   aim: {AIM_CPU_S:g}")
    print(f"{'longest block of the event loop, ms':44}{block_ms:16.1f}   aim: {AIM_BLOCK_MS:g}")
    print(f"{'bytes on disk per token':44}{num_bytes / num_tokens:16.1f}")


if __name__ == "__main__":
    main()
