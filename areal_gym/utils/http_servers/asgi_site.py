"""ASGI applications under uvicorn, with the limits that uvicorn does not have."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from areal_gym.utils.http_servers.connections import (
    ConnectionGuard,
    ConnectionLimits,
    request_in_progress,
    stop_listening,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MAX_BODY_BYTES = 16 * 2**20
_MAX_HEADER_BYTES = 64 * 2**10
_GRACE_S = 1


async def serve_asgi(
    app: ASGIApp,
    listener: socket.socket,
    *,
    limits: ConnectionLimits | None = None,
    has_lifespan: bool = False,
    max_body_bytes: int = _MAX_BODY_BYTES,
) -> None:
    """Answers requests until cancelled or interrupted; WebSockets are refused.

    Args:
        app: what answers.
        listener: a socket that listens; the caller closes it.
        limits: what one client can hold; by default `ConnectionLimits()`.
        has_lifespan: whether the application wants to be told of beginning and end.
        max_body_bytes: larger requests are refused.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    limits = limits or ConnectionLimits()
    guard = ConnectionGuard(limits)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await stop_listening(self.servers)
            await super().shutdown(sockets)
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    def protected(*args: Any, **kwargs: Any) -> asyncio.Protocol:
        return guard.protected(lambda: H11Protocol(*args, **kwargs))()

    config = uvicorn.Config(
        _Bounded(app, limits.body_s, max_body_bytes),
        # h11 bounds a header's size; the other implementation does not.
        http=H11Protocol,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ws="none",
        lifespan="on" if has_lifespan else "off",
        # Headers of a proxy are a client's word.
        proxy_headers=False,
        server_header=False,
        log_level="error",
        timeout_keep_alive=max(1, round(limits.idle_s)),
        timeout_graceful_shutdown=_GRACE_S,
    )
    config.load()
    config.http_protocol_class = protected  # type: ignore[assignment]
    server = Server(config)
    try:
        await server.serve(sockets=[listener])
    except asyncio.CancelledError:
        await server.shutdown([listener])  # by itself it does so on signals only
        raise
    finally:
        guard.close()


class _Bounded:
    """Reads a request's body, in time and within bounds, before the application is asked."""

    def __init__(self, app: ASGIApp, body_s: float, max_body_bytes: int) -> None:
        self._app = app
        self._body_s = body_s
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with request_in_progress():
            try:
                async with asyncio.timeout(self._body_s):
                    body = await self._read(receive)
            except TimeoutError:
                await _refuse(send, 408, "the body of the request did not arrive in time")
            except _TooLargeError:
                await _refuse(send, 413, f"more than {self._max_body_bytes} bytes")
            else:
                if body is not None:
                    await self._app(scope, _replayed(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Returns the body, or None when the client has gone away."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise _TooLargeError
            if not message.get("more_body", False):
                return bytes(body)


class _TooLargeError(Exception):
    """A body has more bytes than it may."""


def _replayed(body: bytes, receive: Receive) -> Receive:
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(send: Send, status: int, message: str) -> None:
    from starlette.responses import JSONResponse

    content = {"error": message, "hints": []}
    response = JSONResponse(content, status, headers={"connection": "close"})
    await send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
