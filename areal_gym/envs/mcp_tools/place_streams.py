"""An MCP server that runs inside an episode's place and speaks over its standard streams.

A place runs commands without a standard input. So the trainer listens on a socket inside the place,
and a small launcher there connects to it and makes it the standard streams of the server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from areal_gym.errors import EnvError
from areal_gym.places.base import CommandResult, Place

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

_FIRST_PORT = 8950
_NUM_PORTS = 40
_LINE_BYTES = 16 << 20
_END_S = 1.0
# `exec` keeps the socket as descriptors 0 and 1. An image has Python or bash, or no such server.
_PYTHON = (
    "import os, socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
    "[os.dup2(s.fileno(), n) for n in (0, 1)]; os.execvp(sys.argv[2], sys.argv[2:])"
)
_LAUNCHER = (
    "port=$1; shift; if command -v python3 >/dev/null; "
    'then exec python3 -c "$LAUNCH" "$port" "$@"; '
    "elif command -v bash >/dev/null; then exec bash -c 'exec 3<>/dev/tcp/127.0.0.1/$0; "
    'exec "$@" <&3 >&3\' "$port" "$@"; else echo "no python3 and no bash" >&2; exit 127; fi'
)
_ports = itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + _NUM_PORTS))


@asynccontextmanager
async def place_streams(
    place: Place,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None,
    open_timeout_s: float,
    on_end: Callable[[str], None],
    lifetime_s: float = 24 * 3600.0,
) -> AsyncIterator[TransportStreams]:
    """Start a server inside a place; yield the streams of its messages.

    `on_end` gets the exit code and the errors of a server that has ended by itself.

    Raises:
        EnvError: the server does not start.
        SandboxError: the place is gone, or nothing can listen inside.
    """
    port = next(_ports)
    listener = await place.listen(port)
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    connected = asyncio.get_running_loop().create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if connected.done():
            writer.close()
        else:
            connected.set_result((reader, writer))

    server = await asyncio.start_server(accept, sock=listener, limit=_LINE_BYTES)
    command = ["/bin/sh", "-c", _LAUNCHER, "sh", str(port), *argv]
    running = asyncio.create_task(
        place.run(command, cwd=cwd, env={**env, "LAUNCH": _PYTHON}, timeout_s=lifetime_s)
    )
    try:
        either: list[asyncio.Future[Any]] = [running, connected]
        await asyncio.wait(either, timeout=open_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            raise EnvError(f"{argv[0]} does not start inside the place: {_reason(running)}")
        server.close()
        async with _message_streams(*connected.result()) as streams:
            yield streams
    finally:
        server.close()
        if connected.done() and _is_over(connected.result()[0]):
            await asyncio.wait({running}, timeout=_END_S)
            if running.done() and not running.cancelled() and running.exception() is None:
                on_end(_reason(running))
        running.cancel()
        await asyncio.wait({running})


def _is_over(reader: asyncio.StreamReader) -> bool:
    """Return whether the other side has closed the connection, or has reset it."""
    return reader.at_eof() or reader.exception() is not None


def _reason(running: asyncio.Task[CommandResult]) -> str:
    if not running.done():
        return "it has not connected in time"
    result = running.result()
    return f"exit code {result.exit_code}: {result.stderr.decode('utf-8', 'replace')[-400:]}"


@asynccontextmanager
async def _message_streams(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[TransportStreams]:
    """Yield the two streams of a connection whose messages are lines of JSON."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        async with to_client:
            while line := await reader.readline():
                try:
                    message: SessionMessage | Exception = SessionMessage(
                        jsonrpc_message_adapter.validate_json(line, by_name=False)
                    )
                except ValueError as error:
                    message = error
                await to_client.send(message)

    async def write() -> None:
        async with from_client:
            async for sent in from_client:
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                writer.write(text.encode() + b"\n")
                await writer.drain()

    tasks = [asyncio.create_task(read()), asyncio.create_task(write())]
    try:
        yield from_server, to_server
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()
        for stream in (to_client, from_server, to_server, from_client):
            await stream.aclose()
