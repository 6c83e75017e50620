"""The rule on MCP servers that an environment was given."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from areal_gym.envs.base import run_on_kept_loop
from areal_gym.envs.checker.adversarial import hostile_calls
from areal_gym.envs.checker.env_under_test import EnvUnderTest, RuleViolation
from areal_gym.envs.mcp_tools.env_with_servers import EnvWithServers
from areal_gym.envs.tools import Tool
from areal_gym.errors import EpisodeError, ToolError

_PATIENCE_S = 10.0


def check_mcp_servers(subject: EnvUnderTest) -> str:
    """MCP servers list the same tools twice, bear hostile arguments and leave no process."""
    env = subject.make()
    if not isinstance(env, EnvWithServers):
        return ""  # it was given none
    env.servers.shares_all = False
    return run_on_kept_loop(_check(env))


async def _check(env: EnvWithServers) -> str:
    before = _children()
    first = await env.servers.open()
    schemas = [tool.schema() for tool in first]
    second = await env.servers.open()  # raises if the lists differ
    if [tool.schema() for tool in second] != schemas:
        raise RuleViolation("the servers list other tools when they are opened again")
    num_calls = 0
    for what, message in hostile_calls(second):
        for call in message["tool_calls"][:1]:
            tool = next(tool for tool in second if tool.name == call["function"]["name"])
            await _require_borne(tool, call["function"]["arguments"], what)
            num_calls += 1
    await env.servers.aclose()
    deadline = asyncio.get_running_loop().time() + _PATIENCE_S
    while left := _children() - before:
        if asyncio.get_running_loop().time() > deadline:
            raise RuleViolation(f"processes are left: {', '.join(map(str, sorted(left)))}")
        await asyncio.sleep(0.05)
    return f"{len(second)} tools, {num_calls} hostile calls"


async def _require_borne(tool: Tool, arguments: dict[str, Any], what: str) -> None:
    try:
        await tool(arguments)
    except ToolError:
        return
    except EpisodeError as error:
        raise RuleViolation(f"{what}: the server did not bear it: {error}") from error


def _children() -> set[int]:
    """Return the pids of this process's children, whichever thread started them."""
    pids: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/children") as file:
            pids.update(int(pid) for pid in file.read().split())
    return pids
