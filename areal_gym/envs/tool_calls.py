"""Runs the tool calls of an assistant message within an environment's limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from areal_gym.envs.judging import JudgingBoundary, is_caused_by_output
from areal_gym.envs.tools import Tool
from areal_gym.errors import ToolError
from areal_gym.types import Message, ToolCall


@dataclass(slots=True)
class ToolResults:
    """The result of `call_tools`."""

    messages: list[Message]
    num_calls: int
    num_errors: int
    """Malformed calls, unknown tools, wrong arguments, errors of tools, refused calls."""
    num_refused: int
    """Calls beyond a limit, which were not run."""


class ToolUser(Protocol):
    """The part of an environment that runs tool calls."""

    tools: Sequence[Tool]
    max_calls: int
    max_tool_calls: int | None
    num_tool_calls: int
    tool_s: float
    judges_all_output: bool

    def judging(self) -> JudgingBoundary:
        """Return the boundary that counts errors caused by the policy's output."""
        ...


async def run_calls(env: ToolUser, message: Message) -> ToolResults:
    """Run the message's calls in order; the contract is that of `TextEnv.call_tools`."""
    results: list[Message] = []
    num_errors = 0
    parse_error = message.get("parse_error")
    if parse_error is not None:
        num_errors += 1
        results.append({"role": "tool", "content": f"error: {parse_error}"})
    calls = message.get("tool_calls", [])
    num_allowed = env.max_calls
    if env.max_tool_calls is not None:
        num_allowed = min(num_allowed, env.max_tool_calls - env.num_tool_calls)
    for call in calls[:num_allowed]:
        content, is_error = await _run_call(env, call)
        num_errors += is_error
        name = call["function"]["name"]
        results.append(
            {"role": "tool", "name": name, "tool_call_id": call["id"], "content": content}
        )
    num_refused = 0
    if len(calls) > num_allowed:
        num_refused = len(calls) - num_allowed
        num_errors += num_refused
        limit = (
            f"{num_refused} more calls were not run; at most {env.max_calls} are"
            if num_allowed == env.max_calls
            else f"{num_refused} calls were not run; the {env.max_tool_calls} of an episode "
            "are used up: answer without a tool"
        )
        results.append({"role": "tool", "content": f"error: {limit}"})
    return ToolResults(results, len(calls), num_errors, num_refused)


async def _run_call(env: ToolUser, call: ToolCall) -> tuple[str, bool]:
    """Run one call; return the text for the policy, and whether it is an error."""
    env.num_tool_calls += 1
    name = call["function"]["name"]
    by_name = {tool.name: tool for tool in env.tools}
    start_s = time.perf_counter()
    try:
        if name not in by_name:
            raise ToolError(f"no tool {name!r}; there is: {', '.join(by_name) or 'none'}")
        return await by_name[name](call["function"]["arguments"]), False
    except ToolError as error:
        return f"error: {error}", True
    except BaseException as error:
        if not env.judges_all_output or not is_caused_by_output(error):
            raise
        env.judging().num_errors += 1
        return f"error: {type(error).__name__}", True
    finally:
        env.tool_s += time.perf_counter() - start_s
