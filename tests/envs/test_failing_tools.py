"""Tools that raise or hang end an episode as a failure, and are no reward."""

from __future__ import annotations

import asyncio

import pytest

import areal_gym
from areal_gym import Response, StopReason, Task, TextEnv, ToolError, tool
from areal_gym.dialects import write_call


@tool
async def hang() -> str:
    """Never answer."""
    await asyncio.sleep(60)
    return "late"


@tool
def crash() -> str:
    """Break."""
    raise ZeroDivisionError("oops")


@tool
def complain() -> str:
    """Say what is wrong."""
    raise ToolError("not like this")


class WithTools(TextEnv):
    """Calls what it is told to."""

    tools = (hang, crash, complain)
    max_turns = 2
    suspends = True

    def sample_task(self, rng, options):
        return Task(id="one", data={})

    def num_tasks(self, split):
        return 1

    def first_messages(self, task):
        return [{"role": "user", "content": "Go."}]

    async def respond(self, message):
        if message.get("tool_calls"):
            return Response(messages=(await self.call_tools(message)).messages, reward=0.5)
        return Response(reward=1.0, is_terminated=True)


@pytest.mark.parametrize(
    ("name", "reason", "error"),
    [
        ("hang", StopReason.TIMEOUT, "more than 0.2 s"),
        ("crash", StopReason.ENV_ERROR, "ZeroDivisionError('oops')"),
    ],
)
def test_the_episode_fails_and_is_not_scored(name, reason, error):
    played = areal_gym.rollout(lambda messages: write_call(name, {}), WithTools, n=2, timeout_s=0.2)
    assert {t.stop_reason for t in played} == {reason}
    assert all(error in t.error for t in played)
    assert played.scored == []
    assert [row["reward"] for row in played.rows()] == [None, None]


def test_what_a_tool_complains_of_is_told():
    def policy(messages):
        return write_call("complain", {}) if len(messages) == 1 else "done"

    (played,) = areal_gym.rollout(policy, WithTools, n=1)
    assert played.messages[2]["content"] == "error: not like this"
    assert played.reward == 1.5
