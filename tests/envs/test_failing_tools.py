"""Tools that raise or hang end the episode as a failure, not as a reward."""

from __future__ import annotations

import asyncio
import threading

import pytest

import areal_gym
from areal_gym import Response, StopReason, Task, TextEnv, ToolError, tool
from areal_gym.chat.tool_call_formats import write_call


@tool
async def hang() -> str:
    """Never answer."""
    await asyncio.sleep(60)
    return "late"


BLOCKED = threading.Event()


@tool(in_thread=True)
def block() -> str:
    """Block the caller."""
    BLOCKED.wait(60)
    return "late"


@tool(in_thread=True)
def crash_in_thread() -> str:
    """Break in a thread."""
    raise ZeroDivisionError("oops")


@tool(in_thread=True)
def add(a: int, b: int = 1) -> str:
    """Add."""
    return str(a + b)


@tool
def crash() -> str:
    """Break."""
    raise ZeroDivisionError("oops")


@tool
def complain() -> str:
    """Say what is wrong."""
    raise ToolError("not like this")


class WithTools(TextEnv):
    """Runs the tool calls of the policy."""

    tools = (hang, block, crash, crash_in_thread, add, complain)
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
        ("block", StopReason.TIMEOUT, "more than 0.2 s"),
        ("crash_in_thread", StopReason.ENV_ERROR, "ZeroDivisionError('oops')"),
        ("crash", StopReason.ENV_ERROR, "ZeroDivisionError('oops')"),
    ],
)
def test_failing_or_hanging_tool_fails_the_episode(name, reason, error):
    BLOCKED.clear()
    rollouts = areal_gym.rollout(
        lambda messages: write_call(name, {}), WithTools, n=2, timeout_s=0.2
    )
    BLOCKED.set()
    assert {t.stop_reason for t in rollouts} == {reason}
    assert all(error in t.error for t in rollouts)
    assert rollouts.scored == []
    assert [row["reward"] for row in rollouts.rows()] == [None, None]


def test_tool_in_a_thread_returns_its_result():
    assert add.parameters["required"] == ["a"]

    def policy(messages):
        return write_call("add", {"a": 2}) if len(messages) == 1 else "done"

    (trajectory,) = areal_gym.rollout(policy, WithTools, n=1)
    assert trajectory.messages[2]["content"] == "3"
    env = WithTools()
    env.reset(seed=0)
    assert env.step(write_call("add", {"a": 2, "b": 5})).observation == "7"
    env.close()


def test_tool_error_is_sent_to_the_policy():
    def policy(messages):
        return write_call("complain", {}) if len(messages) == 1 else "done"

    (trajectory,) = areal_gym.rollout(policy, WithTools, n=1)
    assert trajectory.messages[2]["content"] == "error: not like this"
    assert trajectory.reward == 1.5
