"""Runs the tools that a policy called over HTTP: once per message, for all of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from areal_gym.envs.base import StepResult
from areal_gym.errors import AgentError
from areal_gym.types import Message, ToolCall, readable

ActOn = Callable[[Message, list[ToolCall]], Awaitable[StepResult | None]]
"""Hands a message with these calls to the environment; returns None if the episode is over."""


class ToolRuns:
    """The messages of one episode whose tools were run, and their outputs."""

    def __init__(self) -> None:
        self._runs: dict[int, asyncio.Task[dict[str, str]]] = {}

    async def output_of(
        self, message: Message, call_id: str, tools: Collection[str], act_on: ActOn
    ) -> str:
        """Return the output of one call of a message; raise AgentError for an unknown tool."""
        calls = [call for call in message["tool_calls"] if call["function"]["name"] in tools]
        if all(call["id"] != call_id for call in calls):
            raise AgentError(
                f"the call {call_id!r} names a tool that the environment does not have"
            )
        if id(message) not in self._runs:
            self._runs[id(message)] = asyncio.create_task(_run(message, calls, act_on))
        results = await asyncio.shield(self._runs[id(message)])
        return results.get(call_id, "the episode is over")

    def cancel(self) -> None:
        """Cancel the tools that are still running."""
        for run in self._runs.values():
            run.cancel()


async def _run(message: Message, calls: list[ToolCall], act_on: ActOn) -> dict[str, str]:
    """Hand a message with its calls to the environment; return the output of each by call id."""
    result = await act_on(message, calls)
    outputs: dict[str, str] = {}
    for index, reply in enumerate(() if result is None else result.info["messages"]):
        key = reply.get("tool_call_id") or calls[min(index, len(calls) - 1)]["id"]
        outputs[key] = "\n".join(filter(None, (outputs.get(key), readable(reply["content"]))))
    return outputs
