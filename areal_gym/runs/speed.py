"""Measures the parts of a run on this machine, and compares them with README's "Speed".

Each part runs for some seconds in this process, on the CPU, with one thread, and the best of a few
rounds counts. If only this process works, processor seconds are measured, because other work on the
machine disturbs wall seconds far more.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig, TrainerConfig
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.tools import tool
from areal_gym.errors import UsageError, did_you_mean
from areal_gym.plugins import registry
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.types import FinishReason, Group, Message, Task, TokenSpan, Trajectory, Turn, text_of
from areal_gym.utils.garbage import relax_garbage_collection

if TYPE_CHECKING:
    import numpy as np

    from areal_gym.engines.embedded import EmbeddedEngine
    from areal_gym.models.tiny.decoder_config import DecoderConfig

REFERENCES: Mapping[str, float] = {"rollout": 0.25, "sandbox": 2.6, "engine": 44_000, "step": 0.62}
"""The figures in README's "Speed", by part."""

PARTS = ("rollout", "env", "sandbox", "engine", "step")
WITH_TORCH = ("engine", "step")
"""Parts that are skipped if torch is not installed."""

_PART_S = 3.0
"""Seconds of rounds for each part."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of `areal-gym bench`."""

    part: str
    what: str
    """What was measured."""
    value: float
    unit: str
    reference: float | None = None
    """The figure in README's "Speed"."""
    is_more_better: bool = False

    @property
    def speed(self) -> float | None:
        """The speed relative to README's machine: 2 is twice as fast."""
        if self.reference is None or not self.value:
            return None
        ratio = self.value / self.reference
        return ratio if self.is_more_better else 1 / ratio


def bench(parts: Sequence[str] = (), *, env: str = "tir") -> Iterator[Figure]:
    """Measure the parts, by default all `PARTS`; the part "env" plays the environment `env`.

    Raises:
        UsageError: a part does not exist, or needs a package that is not installed.
        UnknownIdError: the environment does not exist.
    """
    for name in parts:
        if name not in PARTS:
            near = did_you_mean(name, PARTS)
            raise UsageError(f"no part {name!r}", hints=[near or f"available: {', '.join(PARTS)}"])
    registry().get("envs", env)
    embedded = registry().get("engines", "embedded")
    if embedded.missing:
        if without := [name for name in parts if name in WITH_TORCH]:
            raise UsageError(
                f"the part {without[0]!r} needs {', '.join(embedded.missing)}",
                hints=[f"install it: {embedded.install_command}"],
            )
        parts = parts or [name for name in PARTS if name not in WITH_TORCH]
    restore_collection = relax_garbage_collection()  # as a run does
    try:
        for name in parts or PARTS:
            yield from _env(env) if name == "env" else (_measured(name),)
    finally:
        restore_collection()


def _rounds(least: int, share: float = 1.0) -> Iterator[int]:
    """Yield round numbers from 0: at least `least`, and more until the part's time is over."""
    end_s = time.perf_counter() + share * _PART_S
    for number in count():
        if number >= least and time.perf_counter() > end_s:
            return
        yield number


def _measured(part: str) -> Figure:
    measure, unit, description = _COMPARED[part]
    with _one_thread() if part in WITH_TORCH else nullcontext():
        value = asyncio.run(measure())
    is_more_better = unit.startswith("/")
    return Figure(part, description, value, unit, REFERENCES[part], is_more_better=is_more_better)


# ---- episodes -----------------------------------------------------------------------------------

CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Sums(TextEnv):
    """Takes any number of tool calls, then an answer; the tool's results differ in every task."""

    tools = (add,)
    max_turns = 32

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return a task with a number that hardly repeats."""
        number = int(rng.integers(10**9))
        return Task(id=str(number), data={"number": number})

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return a system message and the question."""
        question = f"What is {task.data['number']} + 7?"
        system: Message = {"role": "system", "content": "Use the tool."}
        return [system, {"role": "user", "content": question}]

    async def respond(self, message: Message) -> Response:
        """Return the tool's result, or end the episode."""
        if message.get("tool_calls"):
            results = await self.call_tools(message)
            for result in results.messages:
                number = self.task.data["number"] + self.num_turns
                result["content"] = f"{text_of(result['content'])} and {number}"
            return Response(messages=results.messages, metrics={"tool_calls": results.num_calls})
        return Response(reward=1.0, reward_parts={"answer": 1.0}, is_terminated=True)


async def _episode_ms() -> float:
    batch_groups, group_size = 64, 8
    engine = ScriptedEngine([CALL] * 4 + ["The answer is 7."])
    config = RolloutConfig(
        batch_groups=batch_groups, group_size=group_size, max_in_flight=64, max_new_tokens=256
    )
    setup = EpisodeSetup(Sums, ChatAgent(), engine, byte_renderer())
    spent_s: list[float] = []
    async with RolloutRunner(setup, config) as runner:
        for number in _rounds(2):
            began_s = time.process_time()
            await runner.next_batch()
            spent_s.append(time.process_time() - began_s)
            await engine.publish([], number + 1)
    return 1e3 * min(spent_s[1:]) / (batch_groups * group_size)


def _env(env: str) -> Iterator[Figure]:
    async def measure() -> tuple[int, float, float]:
        num_done = 0
        seeds = count()
        end_s = 0.0

        async def play(instance: TextEnv) -> None:
            nonlocal num_done
            for seed in seeds:
                instance.reset(seed=seed)
                is_over = False
                while not is_over:
                    result = await instance.astep(instance.gold_action())
                    is_over = result.terminated or result.truncated
                num_done += 1
                if time.perf_counter() > end_s:
                    break
            await instance.aclose()

        envs: list[TextEnv] = [registry().make("envs", env) for _ in range(64)]
        end_s = time.perf_counter() + _PART_S / 6  # sandboxes start and data is read
        await play(registry().make("envs", env))
        num_done, end_s = 0, time.perf_counter() + _PART_S
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(play, envs))
        return num_done, time.perf_counter() - wall_s, time.process_time() - cpu_s

    try:
        num_done, wall_s, cpu_s = asyncio.run(measure())
    except NotImplementedError:
        raise UsageError(
            f"{env!r} has no gold_action(), which would play it here",
            hints=["write one: areal-gym check and areal-gym play use it, too"],
        ) from None
    description = f"episodes of {env} by its own gold policy, 64 in flight"
    yield Figure("env", description, num_done / wall_s, "/s", is_more_better=True)
    yield Figure("env", "  of it in this process", 1e3 * cpu_s / num_done, "CPU-ms")


async def _snippet_ms() -> float:
    spent_s: list[float] = []
    async with registry().make("sandboxes", "process") as sandbox:
        await sandbox.run("print(1)")
        for _ in islice(_rounds(20), 400):
            began_s = time.perf_counter()
            await sandbox.run("print(1)")
            spent_s.append(time.perf_counter() - began_s)
    return 1e3 * statistics.median(spent_s)


# ---- policy and trainer -------------------------------------------------------------------------


def shape(name: str) -> DecoderConfig:
    """Return the shape of a model to measure with: "0.4M", the starter policy's, or "2M"."""
    from areal_gym.models.tiny.decoder_config import DecoderConfig

    is_small = name == "0.4M"
    return DecoderConfig(
        architecture="qwen3" if is_small else "qwen2",
        vocab_size=400 if is_small else 520,
        hidden_size=128 if is_small else 192,
        intermediate_size=384 if is_small else 640,
        num_hidden_layers=2 if is_small else 4,
        num_attention_heads=4 if is_small else 6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512 if is_small else 1024,
    )


async def _sampled_per_s() -> float:
    from areal_gym.engines.embedded import EmbeddedEngine
    from areal_gym.models.tiny.decoder import build_decoder

    rng = random.Random(0)
    prompts = [[rng.randrange(10, 400) for _ in range(40)] for _ in range(64)]
    engine = EmbeddedEngine(build_decoder(shape("0.4M"), seed=0), num_slots=128, max_context=256)

    async def sample(number: int) -> int:
        params = SamplingParams(max_new_tokens=64, seed=number)
        generation = await engine.generate(prompts[number], params, session=f"{number}")
        return len(generation.token_ids)

    await engine.start()
    paces: list[float] = []
    for _ in _rounds(2):
        began_s = time.process_time()
        num_tokens = sum(await asyncio.gather(*map(sample, range(len(prompts)))))
        paces.append(num_tokens / (time.process_time() - began_s))
        for number in range(len(prompts)):
            engine.release(f"{number}")
    await engine.aclose()
    return max(paces[1:])


async def play_groups(
    engine: EmbeddedEngine,
    turns_of: Callable[[random.Random], Sequence[int]],
    rng: random.Random,
    *,
    num_groups: int = 8,
    group_size: int = 8,
    num_prompt: int = 40,
    num_reply: int = 0,
) -> list[Group]:
    """Sample groups of random tokens with given lengths, so that every step does the same work.

    Args:
        engine: samples the turns.
        turns_of: returns the number of new tokens in each turn of an episode.
        rng: decides prompts, replies, rewards and sampling.
        num_groups: the number of groups.
        group_size: the number of episodes in a group.
        num_prompt: the tokens of a prompt.
        num_reply: the tokens of the environment's reply to a turn.
    """

    async def episode(prompt: tuple[int, ...], lengths: Sequence[int], name: str) -> Trajectory:
        ids = list(prompt)
        spans = [TokenSpan(origin="prompt", token_ids=prompt)]
        for turn, length in enumerate(lengths):
            if turn:
                added = tuple(rng.randrange(10, 500) for _ in range(num_reply))
                spans.append(TokenSpan(origin="env", token_ids=added, turn=turn))
                ids += added
            params = SamplingParams(max_new_tokens=length, seed=rng.getrandbits(40))
            sampled = await engine.generate(ids, params, session=name)
            ids += sampled.token_ids
            spans.append(
                TokenSpan(
                    origin="policy",
                    token_ids=sampled.token_ids,
                    logprobs=sampled.logprobs,
                    policy_version=sampled.versions[0],
                    turn=turn,
                )
            )
        engine.release(name)
        rewards = [0.0] * (len(lengths) - 1) + [float(rng.random() < 0.5)]
        return Trajectory(
            id=name,
            group_id=name.partition("-")[0],
            task=Task(id=name, data={}),
            env_id="benchmark",
            spans=tuple(spans),
            turns=tuple(Turn(finish_reason=FinishReason.LENGTH, reward=r) for r in rewards),
        )

    jobs = []
    for g in range(num_groups):
        prompt = tuple(rng.randrange(10, 500) for _ in range(num_prompt))
        jobs += [episode(prompt, turns_of(rng), f"{g}-{i}") for i in range(group_size)]
    played = await asyncio.gather(*jobs)
    return [
        Group(id=members[0].group_id, task=members[0].task, trajectories=tuple(members))
        for g in range(num_groups)
        if (members := played[g * group_size : (g + 1) * group_size])
    ]


async def _step_s() -> float:
    from areal_gym.engines.embedded import EmbeddedEngine
    from areal_gym.models.tiny.decoder import build_decoder

    decoder = build_decoder(shape("2M"), seed=0)
    trainer = registry().load("trainers", "single")(
        decoder,
        TrainerConfig(lr=1e-5),
        advantage=registry().load("advantages", "grpo"),
        loss=registry().load("losses", "ppo_clip"),
    )
    engine = EmbeddedEngine(decoder, num_slots=64, max_context=256)
    await engine.start()
    rng = random.Random(0)
    spent_s: list[float] = []
    for number in _rounds(2, share=2):
        began_s = time.process_time()
        groups = await play_groups(engine, lambda rng: [64], rng)
        trainer.step(groups, number)
        await engine.publish(trainer.weights(), number + 1)
        spent_s.append(time.process_time() - began_s)
    await engine.aclose()
    return min(spent_s[1:])


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_COMPARED: Mapping[str, tuple[Callable[[], Coroutine[Any, Any, float]], str, str]] = {
    "rollout": (
        _episode_ms,
        "CPU-ms",
        "a five-turn tool episode, recorded, scripted policy, 64 in flight",
    ),
    "sandbox": (_snippet_ms, "ms", "a snippet in a fresh sandbox process, median"),
    "engine": (
        _sampled_per_s,
        "/CPU-s",
        "tokens sampled by the embedded engine, batch 64, 0.4M parameters",
    ),
    "step": (
        _step_s,
        "CPU-s",
        "a GRPO step of 64 sequences, 64 new tokens, 2M parameters, generation included",
    ),
}
"""The measurement, unit and description of each part that is compared with README's figures."""
