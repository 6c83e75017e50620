"""The gateway: an HTTP server in front of the policy.

    request -> key -> session -> completion request -> session.complete -> format -> a reply, or
                |                                         |                          a stream
             401, 403                               400, 429, 503

Each episode has a session with its own secret, which is the `api_key` of the program that plays
the episode. Opening, rewarding and ending sessions needs another secret, the control key.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from aiohttp import web

from areal_gym.errors import InfrastructureError
from areal_gym.gateway.http_messages import error_middleware
from areal_gym.gateway.routes import routes_of
from areal_gym.gateway.session import Session
from areal_gym.gateway.session_registry import BOUND_SESSION, SessionRegistry
from areal_gym.utils.http_servers.addresses import http_address
from areal_gym.utils.http_servers.aiohttp_site import HttpSite
from areal_gym.utils.http_servers.connections import ConnectionLimits


class Gateway(SessionRegistry):
    """An HTTP server that serves sessions until it is closed.

    Args:
        host: the address to listen at; other machines cannot reach a loopback address.
        port: the port to listen at; 0 takes any free one.
        control_key: the secret of the control routes; random by default.
        max_body_bytes: the size in bytes above which requests are refused.
        max_calls_at_once: the number of concurrent calls above which status 429 is returned.
        limits: the limits of connections; by default `ConnectionLimits()`.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        control_key: str | None = None,
        max_body_bytes: int = 48 * 2**20,
        max_calls_at_once: int = 16_384,
        limits: ConnectionLimits | None = None,
    ) -> None:
        super().__init__(control_key=control_key, max_calls_at_once=max_calls_at_once)
        self._host, self._port = host, port
        self._max_body_bytes = max_body_bytes
        self._limits = limits
        self._site: HttpSite | None = None

    async def start(self) -> None:
        """Start to listen; raise InfrastructureError if the port is in use."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[error_middleware])
        app.add_routes(routes_of(self))
        site = HttpSite(app, limits=self._limits, handler_cancellation=True)
        try:
            self._port = await site.start(self._host, self._port)
        except OSError as error:
            raise InfrastructureError(
                f"the gateway cannot listen at {self._host}:{self._port}: {error.strerror}",
                hints=["any free port: gateway=127.0.0.1:0"],
            ) from None
        self.url = http_address(self._host, self._port)
        self._site = site

    async def listen_for(self, session: Session, listener: socket.socket) -> Callable[[], None]:
        """Serve only this session at a listening socket, and return a function that stops it.

        Raises:
            InfrastructureError: the gateway is not started, or it is closed.
        """
        if self._site is None:
            raise InfrastructureError("the gateway is closed: it cannot listen at a place")
        return await self._site.listen_at(listener, lambda: BOUND_SESSION.set(session))

    async def aclose(self) -> None:
        """End all sessions and stop listening. Idempotent."""
        for session in list(self.sessions.values()):
            session.close()
        site, self._site = self._site, None
        if site is not None:
            await site.aclose()
