"""The tools of an episode's MCP servers: opened together, named without collisions, closed."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal_gym.envs.mcp_tools.connection import McpConnection
from areal_gym.envs.mcp_tools.server_settings import McpServerSettings
from areal_gym.envs.tools import Tool
from areal_gym.errors import EnvError
from areal_gym.message_types import Content
from areal_gym.places.base import Place
from areal_gym.utils.per_loop import PerLoop

if TYPE_CHECKING:
    from mcp import types

_MAX_NAME = 64


class _SharedConnection:
    """One connection for all episodes of an event loop; opened anew after it was lost."""

    def __init__(self, settings: McpServerSettings) -> None:
        self._settings = settings
        self._opening = asyncio.Lock()
        self._connection: McpConnection | None = None

    async def get(self) -> McpConnection:
        async with self._opening:
            if self._connection is None or self._connection.is_lost:
                await self.aclose()
                connection = McpConnection(self._settings)
                await connection.open()
                self._connection = connection
        return self._connection

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()


_shared: PerLoop[_SharedConnection] = PerLoop(_SharedConnection.aclose)


class ServerTools:
    """The tools of several MCP servers, for one episode after another.

    The first `open` fixes the tools: a server that lists others later is an EnvError.

    Args:
        servers: the servers' settings.
    """

    def __init__(self, servers: Sequence[McpServerSettings]) -> None:
        self._servers = tuple(servers)
        self._own: list[McpConnection] = []
        self._listed: list[dict[str, Any]] | None = None
        self.has_commands = any(each.transport == "stdio" for each in self._servers)
        """Whether one of them is a command."""
        self.shares_all = False
        """Whether every server counts as shared, so that many short episodes need no start each."""

    async def open(self, place: Place | None = None, taken: Sequence[str] = ()) -> tuple[Tool, ...]:
        """Open the servers for an episode and return their tools, sorted by name.

        Commands run inside `place` if there is one. A tool whose name another server has, or that
        is in `taken`, is called SERVER__TOOL.

        Raises:
            UsageError: a server cannot be started at all.
            EnvError: a server does not answer, or lists other tools than before.
        """
        await self.aclose()
        try:
            connections = await asyncio.gather(*(self._open(each, place) for each in self._servers))
        except BaseException:
            await self.aclose()
            raise
        listed = [tool.model_dump(mode="json") for each in connections for tool in each.tools]
        if self._listed is None:
            self._listed = listed
        elif listed != self._listed:
            await self.aclose()
            raise EnvError("an MCP server lists other tools than in the first episode")
        return _tools_of(connections, taken)

    async def aclose(self) -> None:
        """Leave the servers of this episode. May be called twice."""
        own, self._own = self._own, []
        await asyncio.gather(*(connection.aclose() for connection in own))

    async def _open(self, settings: McpServerSettings, place: Place | None) -> McpConnection:
        if (settings.shared or self.shares_all) and place is None:
            key = settings.model_dump_json()
            return await _shared.get(lambda: _SharedConnection(settings), key).get()
        connection = McpConnection(settings)
        self._own.append(connection)
        await connection.open(place if settings.transport == "stdio" else None)
        return connection


def _tools_of(connections: Sequence[McpConnection], taken: Sequence[str]) -> tuple[Tool, ...]:
    listed = [(connection, tool) for connection in connections for tool in connection.tools]
    counts = Counter([*taken, *(_api_name(tool.name) for _, tool in listed)])
    tools: dict[str, Tool] = {}
    for connection, tool in listed:
        name = _api_name(tool.name)
        if counts[name] > 1:
            name = _api_name(f"{connection.settings.name}__{tool.name}")
        if name in tools or name in taken:
            raise EnvError(
                f"two tools are called {name!r}", hints=["give the MCP server another name"]
            )
        tools[name] = _tool(name, connection, tool)
    return tuple(tools[name] for name in sorted(tools))


def _tool(name: str, connection: McpConnection, listed: types.Tool) -> Tool:
    async def call(**arguments: object) -> Content:
        return await connection.call(listed.name, arguments)

    server = connection.settings.name
    return Tool(
        name=name,
        description=(listed.description or listed.title or f"{listed.name} of {server}").strip(),
        parameters={"type": "object", **listed.input_schema},
        function=call,
    )


def _api_name(name: str) -> str:
    """Return a name that the APIs of models take."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_MAX_NAME]
