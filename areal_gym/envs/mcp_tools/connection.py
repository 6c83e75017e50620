"""A connection to one MCP server, by the official client.

The client must be entered and left by one task, and episodes open and close in different ones. So
each connection has a task of its own, which lives until `aclose` or until the server is lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import IO, TYPE_CHECKING, Any

from areal_gym.envs.mcp_tools.place_streams import place_streams
from areal_gym.envs.mcp_tools.server_settings import McpServerSettings
from areal_gym.errors import EnvError, EnvUnreachableError, EpisodeError, ToolError, UsageError
from areal_gym.images import image_store
from areal_gym.images.reading import decode_base64
from areal_gym.message_types import Content, joined_content, map_text, text_of
from areal_gym.places.base import Place

if TYPE_CHECKING:
    from mcp import Client, types

MAX_OUTPUT_BYTES = 8192
_MAX_PAGES = 20
_CHANGED = "notifications/tools/list_changed"
_MAX_LOG_CHARS = 400


class McpConnection:
    """A connection to one server: its tools, and calls of them."""

    def __init__(self, settings: McpServerSettings) -> None:
        self.settings = settings
        self.tools: list[types.Tool] = []
        """The tools that the server listed when the connection was opened."""
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._problem = ""
        """The reason why the server can no longer be used."""
        self._log: IO[bytes] | None = None
        self._end = ""
        """How a server inside a place has ended."""

    @property
    def is_lost(self) -> bool:
        """Whether calls would fail: the server has ended, or has changed its tools."""
        return bool(self._problem) or self._task is None or self._task.done()

    async def open(self, place: Place | None = None) -> None:
        """Start or reach the server, and list its tools.

        Raises:
            UsageError: the server's command does not exist, or a variable is not set.
            EnvError: it does not answer in time, or not as a server does.
        """
        opened = self._loop.create_future()
        self._task = asyncio.create_task(self._hold(opened, place))
        try:
            await asyncio.wait(
                {self._task, opened},
                timeout=self.settings.open_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if opened.done():
                return
            if self._task.done():
                raise self._open_error(self._task.exception())
            raise self._open_error(
                TimeoutError(f"no answer within {self.settings.open_timeout_s:g} s")
            )
        finally:
            if not opened.done():
                opened.cancel()
                await self.aclose()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a tool and return its output: texts, cut at 8 kB, and images if they are asked for.

        Raises:
            ToolError: the server objects to the call, or its time is over.
            EnvError: the server is lost, or has changed its tools.
        """
        _require_json(arguments)
        if self.is_lost or self._client is None or self._task is None:
            raise self._lost_error()
        calling = asyncio.create_task(self._client.call_tool(name, dict(arguments)))
        try:
            await asyncio.wait(
                {calling, self._task},
                timeout=self.settings.timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._problem or (self._task.done() and not calling.done()):
                raise self._lost_error()
            if not calling.done():
                raise ToolError(f"{name} has not answered within {self.settings.timeout_s:g} s")
            result = self._result_of(calling)
        finally:
            if not calling.done():
                calling.cancel()
                await asyncio.wait({calling})
            elif not calling.cancelled():
                calling.exception()  # it may have ended after the server was lost
        content = _cut_content(_content_of(result, self.settings.images), MAX_OUTPUT_BYTES)
        if result.is_error:
            raise ToolError(text_of(content) or f"{name} failed")
        return content

    async def aclose(self) -> None:
        """Leave the server; a command is ended. May be called twice, and from another loop."""
        task, self._task = self._task, None
        if task is None:
            return
        if self._loop is not asyncio.get_running_loop():
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._closing.set)
            return
        self._closing.set()
        if self._client is None:
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # the episode is over
        if self._log is not None:
            self._log.close()
            self._log = None

    # ---- the connection's own task --------------------------------------------------------------

    async def _hold(self, opened: asyncio.Future[None], place: Place | None) -> None:
        from mcp import Client

        async with AsyncExitStack() as stack:
            transport = self._transport(stack, place)
            client = await stack.enter_async_context(
                Client(transport, message_handler=self._on_message, cache=None)
            )
            self.tools = await _all_tools(client)
            capabilities = client.server_capabilities.tools
            if capabilities is not None and capabilities.list_changed:
                await self._watch_changes(stack, client)
            self._client = client
            if not opened.done():
                opened.set_result(None)
            await self._closing.wait()

    def _transport(self, stack: AsyncExitStack, place: Place | None) -> Any:
        settings = self.settings
        if settings.transport == "streamable-http":
            from mcp.client.streamable_http import streamable_http_client

            assert settings.url is not None
            return streamable_http_client(settings.url, http_client=self._http_client(stack))
        if settings.transport == "sse":
            from mcp.client.sse import sse_client

            assert settings.url is not None
            return sse_client(settings.url, headers=settings.header_values())
        assert settings.command is not None
        argv = [settings.command, *settings.args]
        env = settings.command_variables()
        if place is not None:
            return place_streams(
                place,
                argv,
                env=env,
                cwd=settings.cwd,
                open_timeout_s=settings.open_timeout_s,
                on_end=self._note_end,
            )
        return self._local_program(stack, argv, env)

    def _http_client(self, stack: AsyncExitStack) -> Any:
        import httpx2

        seconds = self.settings.open_timeout_s
        timeout = httpx2.Timeout(seconds, read=self.settings.timeout_s + seconds)
        client = httpx2.AsyncClient(headers=self.settings.header_values(), timeout=timeout)
        stack.push_async_callback(client.aclose)
        return client

    def _local_program(self, stack: AsyncExitStack, argv: list[str], env: dict[str, str]) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        from areal_gym.places.walled_program import walled_argv

        if shutil.which(argv[0]) is None:
            raise UsageError(
                f"MCP server {self.settings.name!r}: there is no command {argv[0]!r}",
                hints=["is its package installed? give the path of the command"],
            )
        argv[0] = shutil.which(argv[0]) or argv[0]
        if self.settings.where == "walls":
            argv = walled_argv(argv)
            if "PYTHONPATH" in os.environ:
                env = {"PYTHONPATH": os.environ["PYTHONPATH"], **env}
        # The log outlives the connection: the reason of a failure is in it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        server = StdioServerParameters(
            command=argv[0], args=argv[1:], env=env, cwd=self.settings.cwd
        )
        return stdio_client(server, errlog=self._log)  # type: ignore[arg-type]

    async def _on_message(self, message: Any) -> None:
        if getattr(message, "method", None) == _CHANGED:
            self._note_change()

    async def _watch_changes(self, stack: AsyncExitStack, client: Client) -> None:
        """Subscribe to changes of the tools; servers of earlier protocols send them unasked."""
        from mcp.client.subscriptions import ListenNotSupportedError

        async def watch() -> None:
            async for _ in events:
                self._note_change()

        with suppress(ListenNotSupportedError):
            events = await stack.enter_async_context(client.listen(tools_list_changed=True))
            watching = asyncio.create_task(watch())
            stack.callback(watching.cancel)

    def _note_change(self) -> None:
        self._problem = "it has changed its tools; their schemas are fixed at the start"

    def _note_end(self, reason: str) -> None:
        self._end = reason

    # ---- failures -------------------------------------------------------------------------------

    def _result_of(self, calling: asyncio.Task[types.CallToolResult]) -> types.CallToolResult:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        try:
            return calling.result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise self._lost_error() from error
            raise ToolError(f"the server objects: {error}") from error
        except Exception as error:  # of the client's transports: sockets, HTTP, streams
            self._problem = f"it failed: {error!r}"
            raise self._lost_error() from error

    def _lost_error(self) -> EnvError:
        reason = self._problem or "it has ended"
        return EnvError(f"MCP server {self.settings.name!r} is lost: {reason}{self._log_tail()}")

    def _open_error(self, error: BaseException | None) -> Exception:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, EpisodeError | UsageError):
            return error
        settings = self.settings
        source = settings.command or settings.url
        text = f"MCP server {settings.name!r} ({source}) was not opened: "
        text += f"{str(error) or repr(error)}{self._log_tail()}"
        return EnvError(text) if settings.transport == "stdio" else EnvUnreachableError(text)

    def _log_tail(self) -> str:
        if self._log is None:
            return f"; {self._end}" if self._end else ""
        end = self._log.seek(0, 2)
        self._log.seek(max(0, end - 4 * _MAX_LOG_CHARS))
        text = self._log.read().decode("utf-8", "replace").strip()[-_MAX_LOG_CHARS:]
        return f"; it wrote: {text}" if text else ""


async def _all_tools(client: Client) -> list[types.Tool]:
    """Return all pages of the server's tools."""
    tools: list[types.Tool] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise EnvError(f"the server lists more than {_MAX_PAGES} pages of tools")


def _require_json(arguments: Mapping[str, Any]) -> None:
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not JSON: {error}") from None


def _content_of(result: types.CallToolResult, has_images: bool) -> Content:
    parts = [_part(block, has_images) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content)]
    return joined_content(parts, "\n")


def _part(block: types.ContentBlock, has_images: bool) -> Content:
    if block.type == "text":
        return block.text
    if block.type == "image" and has_images:
        try:
            raw = decode_base64(block.data)
            return [image_store().add(raw, media_type=block.mime_type.lower())]
        except UsageError as error:
            return f"[image: {error}]"
    return f"[{block.type}: not shown]"


def _cut_content(content: Content, limit: int) -> Content:
    """Return the content with the first `limit` bytes of its texts."""
    left = limit

    def cut(text: str) -> str:
        nonlocal left
        kept = _cut(text, left)
        left = max(0, left - len(text.encode("utf-8", "replace")))
        return kept

    return map_text(content, cut)


def _cut(text: str, limit: int) -> str:
    """Return the first `limit` bytes of a text, and how many are left out."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return f"{data[:limit].decode('utf-8', 'ignore')}... ({len(data) - limit} more bytes)"
