"""An environment over HTTP: `areal-gym serve-env ENV`."""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import web

from areal_gym.errors import EnvError, GymError, InfrastructureError, UsageError
from areal_gym.serving.sessions import Session, Sessions
from areal_gym.serving.wire import describe, error_body, step_body

__all__ = ["EnvServer", "is_loopback", "made_up_token"]

_MAX_BODY = 64 * 2**20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def made_up_token(host: str) -> str | None:
    """A secret, where other machines can come in."""
    return None if is_loopback(host) else secrets.token_urlsafe(24)


class EnvServer:
    """Listens while it is entered. An asynchronous context manager, inside that of its sessions.

    Args:
        sessions: where episodes are kept.
        env_id: what the environment is called.
        host: where it listens.
        port: 0 is any that is free.
        token: what clients must send.

    Raises:
        UsageError: other machines could come in, and there is no token.
    """

    def __init__(
        self,
        sessions: Sessions,
        env_id: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
    ) -> None:
        if token is None and not is_loopback(host):
            raise UsageError(f"a token is needed to listen at {host}")
        self.sessions = sessions
        self._token = token
        self._host = host
        self._port = port
        self._card = describe(sessions.example, env_id)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            InfrastructureError: the port is taken.
        """
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard, _tell_errors])
        app.add_routes(
            [
                web.get("/v1/env", self._env),
                web.post("/v1/sessions", self._open),
                web.post("/v1/sessions/{session}/reset", self._reset),
                web.post("/v1/sessions/{session}/step", self._step),
                web.get("/v1/sessions/{session}/{policy:gold|noop}", self._action),
                web.delete("/v1/sessions/{session}", self._close),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, backlog=2048).start()
        except OSError as error:
            await self._runner.cleanup()
            raise InfrastructureError(
                f"cannot listen at {self._host}:{self._port}: {error.strerror}",
                hints=["any free port: --port 0"],
            ) from None
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- who may ask ---------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # A page in a browser on this machine reaches loopback, too, under any name that it likes.
        is_foreign = is_loopback(self._host) and not is_loopback(
            urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
        )
        if "Origin" in request.headers or is_foreign:
            return _denied("browsers are not served here")
        if self._token is not None:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return _denied("the token is missing or wrong")
        return await handler(request)

    # ---- routes --------------------------------------------------------------------------------

    async def _env(self, request: web.Request) -> web.Response:
        return web.json_response({**self._card, "num_sessions": len(self.sessions)})

    async def _open(self, request: web.Request) -> web.Response:
        body = await _read(request)
        session = self.sessions.open()
        try:
            return await self._begin(session, body)
        except BaseException:
            await self.sessions.close(session.id)
            raise

    async def _reset(self, request: web.Request) -> web.Response:
        return await self._begin(self._session(request), await _read(request))

    async def _begin(self, session: Session, body: dict[str, Any]) -> web.Response:
        seed, options = body.get("seed"), body.get("options") or {}
        if seed is not None and not (type(seed) is int and 0 <= seed < 2**64):
            raise UsageError(f"a seed is a whole number from 0 on, not {seed!r}")
        if not isinstance(options, dict):
            raise UsageError("options are an object")
        info = await session.reset(seed, options)
        return web.json_response(
            {
                "session": session.id,
                "hash": self._card["hash"],
                "task": info["task"],
                "messages": list(info["messages"]),
            }
        )

    async def _step(self, request: web.Request) -> web.Response:
        session, body = self._session(request), await _read(request)
        turn, message = body.get("turn"), body.get("message")
        if isinstance(message, dict) and not isinstance(message.get("content"), str):
            raise UsageError("a message is an object with a text as its `content`")
        if type(turn) is not int:
            raise UsageError("which turn? `turn` is 1 for the first")
        # Both kinds of action; whatever else came, the environment refuses by itself.
        return web.json_response(step_body(await session.step(message, turn=turn)))  # type: ignore[arg-type]

    async def _action(self, request: web.Request) -> web.Response:
        env = self._session(request).env
        is_gold = request.match_info["policy"] == "gold"
        return web.json_response({"action": env.gold_action() if is_gold else env.noop_action()})

    async def _close(self, request: web.Request) -> web.Response:
        await self.sessions.close(request.match_info["session"])
        return web.json_response({})

    def _session(self, request: web.Request) -> Session:
        return self.sessions.get(request.match_info["session"])


async def _read(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        raise UsageError("the body is no JSON") from None
    if not isinstance(body, dict):
        raise UsageError("the body is no object")
    return body


def _denied(why: str) -> web.Response:
    return web.json_response({"error": {"kind": "denied", "message": why, "hints": []}}, status=401)


@web.middleware
async def _tell_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except GymError as error:
        status, body = error_body(error)
    except web.HTTPException as error:  # no such route, too large a body
        _, body = error_body(UsageError(f"{request.method} {request.path}: {error.reason}"))
        status = error.status
    except Exception as error:
        status, body = error_body(EnvError(f"the environment failed: {error!r}"))
    return web.Response(status=status, text=json.dumps(body), content_type="application/json")
