"""How fast this machine is at each part of a run, next to the machine of README's "Speed".

Each part takes some seconds in this process, on the CPU, with one thread; the best of a few rounds
counts, and processor seconds rather than wall seconds where only this process works: other work on
the machine disturbs both, but the latter far more.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from areal_gym.types import FinishReason, Group, Message, Task, TokenSpan, Trajectory, Turn
from areal_gym.utils.garbage import relax_garbage_collection

if TYPE_CHECKING:
    import numpy as np

    from areal_gym.engines.embedded import EmbeddedEngine
    from areal_gym.models.tiny.decoder_config import DecoderConfig

REFERENCES: Mapping[str, float] = {"rollout": 0.25, "sandbox": 2.6, "engine": 44_000, "step": 0.62}
"""Of README's "Speed", by part."""

WITH_TORCH = ("engine", "step")
"""Parts that are left out where it is not installed."""

_SOME_S = 3.0
"""How long a part goes on with its rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One line of `areal-gym bench`."""

    part: str
    what: str
    value: float
    unit: str
    reference: float | None = None
    """What README's "Speed" has for it."""
    is_more_better: bool = False

    @property
    def speed(self) -> float | None:
        """How fast next to README's machine: 2 is twice as fast."""
        if self.reference is None or not self.value:
            return None
        ratio = self.value / self.reference
        return ratio if self.is_more_better else 1 / ratio


def bench(parts: Sequence[str] = (), *, env: str = "tir") -> Iterator[Figure]:
    """Measure the parts, all of `PARTS` by default; `env` is what the part "env" plays.

    Raises:
        UsageError: there is no such part, or it needs what is not installed.
        UnknownIdError: there is no such environment.
    """
    for name in parts:
        if name not in PARTS:
            near = did_you_mean(name, PARTS)
            raise UsageError(f"no part {name!r}", hints=[near or f"there is: {', '.join(PARTS)}"])
    registry().get("envs", env)
    embedded = registry().get("engines", "embedded")
    if embedded.missing:
        if without := [name for name in parts if name in WITH_TORCH]:
            raise UsageError(
                f"the part {without[0]!r} needs {', '.join(embedded.missing)}",
                hints=[f"install it: {embedded.install_command}"],
            )
        parts = parts or [name for name in PARTS if name not in WITH_TORCH]
    collect_as_before = relax_garbage_collection()  # as a run does
    try:
        for name in parts or PARTS:
            yield from PARTS[name](env)
    finally:
        collect_as_before()


# ---- episodes -----------------------------------------------------------------------------------

CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Sums(TextEnv):
    """Any number of tool calls, then an answer. The tool answers differently in every task."""

    tools = (add,)
    max_turns = 32

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Numbers that hardly come again."""
        number = int(rng.integers(10**9))
        return Task(id=str(number), data={"number": number})

    def first_messages(self, task: Task) -> Sequence[Message]:
        """A system message, and the question."""
        question = f"What is {task.data['number']} + 7?"
        return [
            {"role": "system", "content": "Use the tool."},
            {"role": "user", "content": question},
        ]

    async def respond(self, message: Message) -> Response:
        """The tool's result, or the end."""
        if message.get("tool_calls"):
            results = await self.call_tools(message)
            for result in results.messages:
                result["content"] += f" and {self.task.data['number'] + self.num_turns}"
            return Response(messages=results.messages, metrics={"tool_calls": results.num_calls})
        return Response(reward=1.0, reward_parts={"answer": 1.0}, is_terminated=True)


def _rollout(env: str) -> Iterator[Figure]:
    batch_groups, group_size, in_flight = 64, 8, 64

    async def measure() -> float:
        engine = ScriptedEngine([CALL] * 4 + ["The answer is 7."])
        config = RolloutConfig(
            batch_groups=batch_groups,
            group_size=group_size,
            max_in_flight=in_flight,
            max_new_tokens=256,
        )
        found: list[float] = []
        async with RolloutRunner(
            EpisodeSetup(Sums, ChatAgent(), engine, byte_renderer()), config
        ) as runner:
            end_s = time.perf_counter() + _SOME_S
            while len(found) < 2 or time.perf_counter() < end_s:
                began_s = time.process_time()
                await runner.next_batch()
                found.append(time.process_time() - began_s)
                await engine.publish([], len(found))
        return min(found[1:])

    cpu_s = asyncio.run(measure()) / (batch_groups * group_size)
    yield Figure(
        part="rollout",
        what=f"a five-turn tool episode, recorded, scripted policy, {in_flight} in flight",
        value=1e3 * cpu_s,
        unit="CPU-ms",
        reference=REFERENCES["rollout"],
    )


def _env(env: str) -> Iterator[Figure]:
    async def measure() -> tuple[int, float, float]:
        num_done = 0
        seeds = iter(range(10**9))
        end_s = 0.0

        async def restart_on_lost_rank(made: TextEnv) -> None:
            nonlocal num_done
            for seed in seeds:
                made.reset(seed=seed)
                is_over = False
                while not is_over:
                    result = await made.astep(made.gold_action())
                    is_over = result.terminated or result.truncated
                num_done += 1
                if time.perf_counter() > end_s:
                    break
            await made.aclose()

        envs: list[TextEnv] = [registry().make("envs", env) for _ in range(64)]
        end_s = time.perf_counter() + _SOME_S / 6  # sandboxes start, data is read
        await restart_on_lost_rank(registry().make("envs", env))
        num_done, end_s = 0, time.perf_counter() + _SOME_S
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(restart_on_lost_rank, envs))
        return num_done, time.perf_counter() - wall_s, time.process_time() - cpu_s

    try:
        num_done, wall_s, cpu_s = asyncio.run(measure())
    except NotImplementedError:
        raise UsageError(
            f"{env!r} has no gold_action(), which would play it here",
            hints=["write one: areal-gym check and areal-gym play use it, too"],
        ) from None
    what = f"episodes of {env} by its own gold policy, 64 in flight"
    yield Figure(part="env", what=what, value=num_done / wall_s, unit="/s", is_more_better=True)
    yield Figure(
        part="env", what="  of it in this process", value=1e3 * cpu_s / num_done, unit="CPU-ms"
    )


# ---- sandbox ------------------------------------------------------------------------------------


def _sandbox(env: str) -> Iterator[Figure]:
    async def measure() -> float:
        async with registry().make("sandboxes", "process") as sandbox:
            await sandbox.run("print(1)")
            found: list[float] = []
            end_s = time.perf_counter() + _SOME_S
            while len(found) < 20 or (len(found) < 400 and time.perf_counter() < end_s):
                began_s = time.perf_counter()
                await sandbox.run("print(1)")
                found.append(time.perf_counter() - began_s)
            return statistics.median(found)

    yield Figure(
        part="sandbox",
        what="a snippet in a fresh sandbox process, median",
        value=1e3 * asyncio.run(measure()),
        unit="ms",
        reference=REFERENCES["sandbox"],
    )


# ---- policy and trainer -------------------------------------------------------------------------


def shape(name: str) -> DecoderConfig:
    """Models to measure with: "0.4M", the starter policy's shape, and "2M"."""
    from areal_gym.models.tiny.decoder_config import DecoderConfig

    if name == "0.4M":
        return DecoderConfig(
            architecture="qwen3",
            vocab_size=400,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
        )
    return DecoderConfig(
        architecture="qwen2",
        vocab_size=520,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )


def _engine(env: str) -> Iterator[Figure]:
    from areal_gym.engines.embedded import EmbeddedEngine
    from areal_gym.models.tiny.decoder import build_decoder

    rng = random.Random(0)
    prompts = [[rng.randrange(10, 400) for _ in range(40)] for _ in range(64)]

    async def measure() -> float:
        decoder = build_decoder(shape("0.4M"), seed=0)
        engine = EmbeddedEngine(decoder, num_slots=128, max_context=256)
        await engine.start()
        found: list[float] = []
        end_s = time.perf_counter() + _SOME_S
        while len(found) < 2 or time.perf_counter() < end_s:
            began_s = time.process_time()
            played = await asyncio.gather(
                *(
                    engine.generate(
                        prompt, SamplingParams(max_new_tokens=64, seed=i), session=f"{i}"
                    )
                    for i, prompt in enumerate(prompts)
                )
            )
            spent_s = time.process_time() - began_s
            found.append(sum(len(one.token_ids) for one in played) / spent_s)
            for i in range(len(prompts)):
                engine.release(f"{i}")
        await engine.aclose()
        return max(found[1:])

    yield Figure(
        part="engine",
        what="tokens sampled by the embedded engine, batch 64, 0.4M parameters",
        value=_with_one_thread(lambda: asyncio.run(measure())),
        unit="/CPU-s",
        reference=REFERENCES["engine"],
        is_more_better=True,
    )


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
    """Groups of random tokens whose lengths are forced, so that every step does the same work.

    Args:
        engine: who samples.
        turns_of: new tokens of each turn of an episode.
        rng: of prompts, replies, rewards and sampling.
        num_groups: prompts.
        group_size: siblings.
        num_prompt: tokens of a prompt.
        num_reply: tokens of the environment's answer to a turn.
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
            found = await engine.generate(ids, params, session=name)
            ids += found.token_ids
            spans.append(
                TokenSpan(
                    origin="policy",
                    token_ids=found.token_ids,
                    logprobs=found.logprobs,
                    policy_version=found.versions[0],
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


def _step(env: str) -> Iterator[Figure]:
    from areal_gym.engines.embedded import EmbeddedEngine
    from areal_gym.models.tiny.decoder import build_decoder

    async def measure() -> float:
        decoder = build_decoder(shape("2M"), seed=0)
        trainer = registry().load("trainers", "single")(
            decoder,
            TrainerConfig(lr=1e-5),
            advantage=registry().load("advantages", "grpo"),
            loss=registry().load("losses", "ppo_clip"),
        )
        engine = EmbeddedEngine(decoder, num_slots=64, max_context=256)
        await engine.start()
        rng, found = random.Random(0), list[float]()
        end_s = time.perf_counter() + 2 * _SOME_S
        while len(found) < 2 or time.perf_counter() < end_s:
            began_s = time.process_time()
            groups = await play_groups(engine, lambda rng: [64], rng)
            trainer.step(groups, len(found))
            await engine.publish(trainer.weights(), len(found) + 1)
            found.append(time.process_time() - began_s)
        await engine.aclose()
        return min(found[1:])

    yield Figure(
        part="step",
        what="a GRPO step of 64 sequences, 64 new tokens, 2M parameters, generation included",
        value=_with_one_thread(lambda: asyncio.run(measure())),
        unit="CPU-s",
        reference=REFERENCES["step"],
    )


def _with_one_thread(measure: Callable[[], float]) -> float:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure()
    finally:
        torch.set_num_threads(before)


PARTS: Mapping[str, Callable[[str], Iterator[Figure]]] = {
    "rollout": _rollout,
    "env": _env,
    "sandbox": _sandbox,
    "engine": _engine,
    "step": _step,
}
"""What can be measured, by name."""
