"""Runs one tool call of a policy in its environment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from areal_gym.envs.judging import JudgingBoundary, is_caused_by_output
from areal_gym.envs.tools import Tool
from areal_gym.errors import ToolError
from areal_gym.types import Content, ToolCall


class ToolUser(Protocol):
    """The parts of an environment that its tool calls use (`TextEnv`)."""

    tools: Sequence[Tool]
    judges_all_output: bool
    num_tool_calls: int
    tool_s: float

    def judging(self) -> JudgingBoundary:
        """Return the boundary that counts errors."""


async def run_call(env: ToolUser, call: ToolCall) -> tuple[Content, bool]:
    """Run one call; return what the policy reads, and whether it is an error."""
    env.num_tool_calls += 1
    name = call["function"]["name"]
    tools = {tool.name: tool for tool in env.tools}
    start_s = time.perf_counter()
    try:
        if name not in tools:
            raise ToolError(f"no tool {name!r}; there is: {', '.join(tools) or 'none'}")
        return await tools[name].bound_to(env)(call["function"]["arguments"]), False
    except ToolError as error:
        return f"error: {error}", True
    except BaseException as error:
        if not env.judges_all_output or not is_caused_by_output(error):
            raise
        env.judging().num_errors += 1
        return f"error: {type(error).__name__}", True
    finally:
        env.tool_s += time.perf_counter() - start_s
