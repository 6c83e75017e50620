"""10,000 episodes in flight with environments that block, leak, exit, lie and never end.

One episode in three misbehaves: its environment blocks the event loop, leaks memory and threads,
raises an Exception, SystemExit or a BaseException of its own, gives NaN, a wrong type or nothing,
or never answers. Meanwhile the embedded engine's thread is hit by SystemExit again and again.
Every group must be accounted for; those that come through must be whole in what they hold; memory
and threads must come back.
"""

import asyncio
import ctypes
import gc
import random
import threading
import time
from collections import Counter
from pathlib import Path

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.errors import EngineError, EngineUnreachableError, GymError
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.types import Task
from areal_gym.utils.statistics import rss_mb

TRICKS = (
    *("blocks", "leaks", "raises", "exits", "base exception", "keyboard interrupt"),
    *("nan", "infinite", "wrong type", "nothing", "never ends", "cancels itself"),
)


class Leaving(BaseException):
    """No Exception: what catches those lets it pass."""


class Interrupted(KeyboardInterrupt):
    """Raised by code that thinks it is a program."""


leaked: list[bytearray] = []


class Misbehaving(TextEnv):
    """Two turns, then a trick for one task in three."""

    def sample_task(self, rng, options):
        number = int(rng.integers(10**9))
        trick = TRICKS[number // 3 % len(TRICKS)] if number % 3 == 0 else ""
        return Task(id=str(number), data={"trick": trick, "number": number})

    def first_messages(self, task):
        return [{"role": "user", "content": f"Begin {task.data['number'] % 1000}."}]

    async def respond(self, message):
        # Siblings share the task; half of them behave.
        if self.num_turns == 1:
            return Response(messages=[{"role": "user", "content": "Go on."}], reward=0.25)
        if random.random() < 0.5:
            return Response(reward=1.0, is_terminated=True)
        return await self.play_trick(self.task.data["trick"])

    async def play_trick(self, trick):
        match trick:
            case "blocks":
                time.sleep(0.01)
            case "leaks":
                leaked.append(bytearray(10_000))
                self.cycle = [self]
            case "raises":
                raise RuntimeError("broken")
            case "exits":
                raise SystemExit(3)
            case "base exception":
                raise Leaving("gone")
            case "keyboard interrupt":
                raise Interrupted
            case "nan":
                return Response(reward=float("nan"), is_terminated=True)
            case "infinite":
                return Response(reward=float("inf"), is_terminated=True)
            case "wrong type":
                return Response(reward="high", is_terminated=True)
            case "nothing":
                return None
            case "never ends":
                await asyncio.Event().wait()
            case "cancels itself":
                raise asyncio.CancelledError
        return Response(reward=1.0, is_terminated=True)


class Dying(ScriptedEngine):
    """Fails one turn in a thousand, and everything in flight now and then."""

    def __init__(self):
        super().__init__(lambda question: "10")
        self.num_failed = 0

    async def generate(self, prompt_ids, params, *, session=None):
        await asyncio.sleep(random.random() * 0.05)
        if random.random() < 0.001:
            self.num_failed += 1
            raise EngineUnreachableError("the server is gone")
        return await super().generate(prompt_ids, params, session=session)


async def _play(num_in_flight, num_batches, batch_groups):
    config = RolloutConfig(
        batch_groups=batch_groups,
        group_size=4,
        min_group_size=1,
        max_in_flight=num_in_flight,
        max_new_tokens=16,
        max_retries=1,
        max_failure_rate=1.0,
        episode_timeout_s=30.0,
        max_staleness=2,
    )
    engine = Dying()
    groups = 0
    runner = RolloutRunner(EpisodeSetup(Misbehaving, ChatAgent(), engine, byte_renderer()), config)
    async with runner:
        for _ in range(num_batches):
            for group in await runner.next_batch():
                assert not any(t.stop_reason.is_failure for t in group)
                assert all(t.reward in (1.25,) for t in group), [t.reward for t in group]
                assert len(group) + group.num_failed == 4
                groups += 1
            await engine.publish([], engine.policy_version + 1)
        stats = runner.stats()
    gone = stats.num_groups_failed + stats.num_groups_stale
    open_now = stats.groups_running + stats.groups_ready
    assert stats.num_groups_started == groups + gone + open_now, stats
    return engine, stats


def _kill_engine_threads(num_kills):
    """An embedded engine whose thread is hit by SystemExit, and what its callers see."""
    import torch

    from areal_gym.engines.base import SamplingParams
    from areal_gym.engines.embedded import EmbeddedEngine
    from areal_gym.models.tiny.decoder import build_decoder
    from areal_gym.models.tiny.decoder_config import DecoderConfig

    torch.set_num_threads(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = DecoderConfig(
        architecture="qwen3",
        vocab_size=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        **sizes,
        **heads,
    )
    decoder = build_decoder(config, seed=0)
    ends = Counter()

    async def play():
        engine = EmbeddedEngine(decoder, num_slots=16, max_context=400)
        await engine.start()
        params = SamplingParams(max_new_tokens=300)
        try:
            for _ in range(num_kills):
                turns = [asyncio.create_task(engine.generate([5, 6], params)) for _ in range(8)]
                await asyncio.sleep(0.02)
                victims = [t.ident for t in threading.enumerate() if t.name == "areal-gym-engine"]
                for ident in victims:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(ident), ctypes.py_object(SystemExit)
                    )
                async with asyncio.timeout(120):
                    results = await asyncio.gather(*turns, return_exceptions=True)
                for result in results:
                    is_error = isinstance(result, BaseException)
                    assert not is_error or isinstance(result, EngineError), result
                    ends["failed" if is_error else "whole"] += 1
                async with asyncio.timeout(120):  # it serves on
                    await _until_served(engine, SamplingParams(max_new_tokens=4))
        finally:
            await engine.aclose()

    asyncio.run(play())
    return ends


async def _until_served(engine, params):
    """An exception may arrive late, in the next turn; the one after it is served."""
    while True:
        try:
            await engine.generate([5, 6], params)
            return
        except GymError:
            continue


def run(small: bool, directory: Path) -> dict[str, object]:
    """Play, account for every group, kill engine threads, compare memory."""
    sizes = (300, 2, 75) if small else (10_000, 2, 1250)
    random.seed(7)
    leaked.clear()
    asyncio.run(_play(60, 1, 15))  # what is imported and cached once
    _kill_engine_threads(1)
    gc.collect()
    before_mb, threads = rss_mb(), threading.active_count()
    engine, stats = asyncio.run(_play(*sizes))
    ends = _kill_engine_threads(3 if small else 30)
    num_leaked = len(leaked)
    leaked.clear()
    gc.collect()
    after_mb = rss_mb()
    assert threading.active_count() <= threads
    assert after_mb < before_mb + 500, (before_mb, after_mb)
    return {
        "in flight": sizes[0],
        "episodes": stats.num_episodes,
        "groups trained": stats.num_groups,
        "groups dropped": stats.num_groups_failed,
        "groups played again": stats.num_replayed_groups,
        "failures": dict(stats.num_failures),
        "turns that the engine lost": engine.num_failed,
        "leaks": num_leaked,
        "engine turns, threads killed": dict(ends),
        "memory before, after (MB)": (round(before_mb), round(after_mb)),
    }
