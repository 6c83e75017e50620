"""aiohttp applications: where they listen, and how they read what a client sends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from areal_gym.errors import UsageError
from areal_gym.utils.files import MAX_JSON_DEPTH, is_nested_deeper
from areal_gym.utils.http_servers.connections import (
    ConnectionGuard,
    ConnectionLimits,
    request_in_progress,
    stop_listening,
)

_LIMITS = web.AppKey("connection_limits", ConnectionLimits)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestBodyError(UsageError):
    """A body did not arrive, or is not what its headers say; `status` is the answer's."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class HttpSite:
    """An aiohttp application at an address.

    Its connections are held to `limits`; with `handler_cancellation` a handler is cancelled when
    its client hangs up.
    """

    def __init__(
        self,
        app: web.Application,
        *,
        limits: ConnectionLimits | None = None,
        handler_cancellation: bool = False,
    ) -> None:
        self._limits = limits or ConnectionLimits()
        app[_LIMITS] = self._limits
        app.middlewares.insert(0, _in_progress)
        self.guard = ConnectionGuard(self._limits)
        self.runner = web.AppRunner(
            app,
            handler_cancellation=handler_cancellation,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=self._limits.idle_s,
        )
        self._server: asyncio.Server | None = None
        self._stops: dict[socket.socket, Callable[[], None]] = {}

    async def start(self, host: str, port: int, *, backlog: int = 2048) -> int:
        """Listen, and return the port (0 asks for any); raises OSError if the address is taken."""
        await self.runner.setup()
        server = self.runner.server
        assert server is not None
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self.guard.protected(server), host, port, backlog=backlog
            )
        except OSError:
            await self.runner.cleanup()
            raise
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def listen_at(
        self, listener: socket.socket, on_request: Callable[[], object]
    ) -> Callable[[], None]:
        """Serve the application at one more socket; return what closes it and its connections.

        `on_request` is called before each of its requests, in the task that handles it: it may set
        context variables.
        """
        served = self.runner.server
        assert served is not None
        make_request = served.request_factory

        def marked(*args: Any) -> web.BaseRequest:
            on_request()
            return make_request(*args)

        own = web.Server(
            served.request_handler,
            request_factory=marked,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self._limits.idle_s,
        )
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self.guard.protected(own), sock=listener)

        def stop() -> None:
            self._stops.pop(listener, None)
            server.close()
            for connection in own.connections:
                if connection.transport is not None:
                    connection.transport.abort()

        self._stops[listener] = stop
        return stop

    async def aclose(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        for stop in list(self._stops.values()):
            stop()
        await stop_listening([server])
        await self.runner.cleanup()
        self.guard.close()

    def abort_connections(self) -> None:
        """Hang up on all clients, as a process that is killed would."""
        server = self.runner.server
        for connection in server.connections if server else ():
            if connection.transport is not None:
                connection.transport.abort()


@web.middleware
async def _in_progress(request: web.Request, handler: Handler) -> web.StreamResponse:
    with request_in_progress():
        return await handler(request)


async def read_body(request: web.Request) -> bytes:
    """Return the whole body, or raise RequestBodyError: too large, too slow, badly encoded."""
    try:
        if request.content.is_eof():
            return await request.read()
        async with asyncio.timeout(request.app[_LIMITS].body_s):
            return await request.read()
    except TimeoutError:
        text = "the body of the request did not arrive in time"
        raise RequestBodyError(text, status=408) from None
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestBodyError(f"the request is too large: {error.text}", status=413) from None
    except ConnectionError:
        raise  # the client that could be told is gone
    except Exception as error:
        # aiohttp has no common base for what can be wrong with an encoding or with chunks. What
        # is left of the body means nothing: aiohttp would wait for it, fail and log that.
        request.protocol.close()
        request.content.feed_eof()
        raise RequestBodyError(f"the body cannot be read: {error}") from None


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text that is nested moderately, or raise RequestBodyError.

    NaN and infinities are let through: Python's clients write them, and what a policy hands to
    a tool is for the tool to judge.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestBodyError("the body is no JSON") from None
    if is_nested_deeper(value, MAX_JSON_DEPTH):
        raise RequestBodyError(f"the body is nested more than {MAX_JSON_DEPTH} levels deep")
    return value
