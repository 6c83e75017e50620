"""Episodes leave no reference cycles: no episode waits for the garbage collector."""

import asyncio
import gc
import weakref

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.rollout.episode import play_episode
from areal_gym.types import StopReason
from tests._support.sums_env import CALL, Sums

RENDERER = byte_renderer()


class BrokenEnv(Sums):
    async def respond(self, message):
        raise KeyError("env")


class UnclosableEnv(Sums):
    async def aclose(self):
        raise KeyError("aclose")


class BrokenEngine(ScriptedEngine):
    async def generate(self, prompt_ids, params, *, session=None):
        raise KeyError("engine")


class RememberingAgent(ChatAgent):
    """Keeps a weak reference to its episode."""

    async def play(self, episode):
        self.episode = weakref.ref(episode)
        await super().play(episode)


class BrokenAgent(RememberingAgent):
    async def play(self, episode):
        await super().play(episode)
        raise KeyError("agent")


@pytest.mark.parametrize(
    ("case", "stop_reason"),
    [
        ({}, StopReason.COMPLETED),
        ({"env": BrokenEnv}, StopReason.ENV_ERROR),
        ({"env": UnclosableEnv}, StopReason.ENV_ERROR),
        ({"agent": BrokenAgent}, StopReason.AGENT_ERROR),
        ({"engine": BrokenEngine}, StopReason.ENGINE_ERROR),
        ({"max_context": 150}, StopReason.MAX_TOKENS),
        ({"latency_s": 60, "timeout_s": 0.001}, StopReason.TIMEOUT),
    ],
)
def test_episode_is_freed_without_garbage_collection(case, stop_reason):
    env, agent = case.get("env", Sums)(), case.get("agent", RememberingAgent)()
    engine = case.get("engine", ScriptedEngine)(
        [CALL, "It is 10."],
        max_context=case.get("max_context", 4096),
        latency_s=case.get("latency_s", 0.0),
    )
    gc.disable()
    try:
        trajectory = asyncio.run(
            play_episode(
                env,
                agent,
                engine,
                RENDERER,
                options={"split": "test"},
                params=SamplingParams(max_new_tokens=200),
                timeout_s=case.get("timeout_s"),
            )
        )
        assert agent.episode() is None
    finally:
        gc.enable()
    assert trajectory.stop_reason is stop_reason
