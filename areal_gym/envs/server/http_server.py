"""An environment over HTTP: `areal-gym serve-env ENV`."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

from areal_gym.envs.server.env_sessions import Session, Sessions
from areal_gym.envs.server.wire_format import (
    OWNER_HEADER,
    OWNER_VARIABLE,
    OpenEpisode,
    PlayTurn,
    checked,
    describe,
    error_body,
    message_of,
    owner_keys,
    step_body,
)
from areal_gym.errors import EnvError, GymError, InfrastructureError, UsageError
from areal_gym.images import image_store
from areal_gym.utils.http_servers.addresses import (
    host_name,
    http_address,
    is_loopback,
    is_same_secret,
)
from areal_gym.utils.http_servers.aiohttp_site import (
    HttpSite,
    RequestBodyError,
    parse_json,
    read_body,
)
from areal_gym.utils.http_servers.connections import ConnectionLimits

_MAX_BODY = 64 * 2**20

_HAS_OPTIONS = web.RequestKey("has_options", bool)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def made_up_token(host: str) -> str | None:
    """Return a random token if other machines can connect, else None."""
    return None if is_loopback(host) else secrets.token_urlsafe(24)


class EnvServer:
    """Serves an environment: an asynchronous context manager, entered after its sessions.

    Clients must send the token; without one, only this machine may come in (else UsageError). The
    checker must send the owner's key besides, to be told the gold actions: this process knows it,
    others are told by whoever starts the server. Port 0 is any that is free.
    """

    def __init__(
        self,
        sessions: Sessions,
        env_id: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        owner_key: str | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        if token is None and not is_loopback(host):
            raise UsageError(f"a token is needed to listen at {host}")
        self.sessions = sessions
        self.owner_key = owner_key or secrets.token_urlsafe(24)
        self._token = token
        self._host = host
        self._port = port
        self._card = describe(sessions.example, env_id)
        self._limits = limits
        self._site: HttpSite

    @property
    def url(self) -> str:
        """The address of the server."""
        return http_address(self._host, self._port)

    async def __aenter__(self) -> Self:
        """Listen; raises InfrastructureError where the port is taken."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_tell_errors, self._guard])
        session = "/v1/sessions/{session}"
        app.add_routes(
            [
                web.get("/v1/env", self._env),
                web.post("/v1/sessions", self._open),
                web.post(f"{session}/reset", self._reset),
                web.post(f"{session}/step", self._step),
                web.get(f"{session}/gold", self._gold),
                web.get(f"{session}/noop", self._noop),
                web.delete(session, self._close),
                web.get("/v1/images/{sha256}", self._image),
            ]
        )
        self._site = HttpSite(app, limits=self._limits)
        try:
            self._port = await self._site.start(self._host, self._port)
        except OSError as error:
            raise InfrastructureError(
                f"cannot listen at {self._host}:{self._port}: {error.strerror}",
                hints=["any free port: --port 0"],
            ) from None
        owner_keys[self.url] = self.owner_key
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        owner_keys.pop(self.url, None)
        await self._site.aclose()

    # ---- who may ask ---------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # A page in a browser on this machine reaches loopback, too, under any name that it likes.
        is_foreign = is_loopback(self._host) and not is_loopback(
            host_name(request.headers.get("Host", ""))
        )
        if "Origin" in request.headers or is_foreign:
            return _denied("browsers are not served here")
        if self._token is not None:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not is_same_secret(given, self._token):
                return _denied("the token is missing or wrong")
        return await handler(request)

    def _is_owner(self, request: web.Request) -> bool:
        return is_same_secret(request.headers.get(OWNER_HEADER, ""), self.owner_key)

    # ---- routes --------------------------------------------------------------------------------

    async def _env(self, request: web.Request) -> web.Response:
        # Who may not ask for gold need not try.
        has_gold = self._card["has_gold"] and self._is_owner(request)
        card = {**self._card, "has_gold": has_gold, "num_sessions": len(self.sessions)}
        return web.json_response(card)

    async def _open(self, request: web.Request) -> web.Response:
        body = checked(OpenEpisode, parse_json(await read_body(request)))
        request[_HAS_OPTIONS] = bool(body.options)
        return self._opened(*await self.sessions.begin(body.seed, body.options or {}))

    async def _reset(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = checked(OpenEpisode, parse_json(await read_body(request)))
        request[_HAS_OPTIONS] = bool(body.options)
        return self._opened(session, await session.reset(body.seed, body.options or {}))

    def _opened(self, session: Session, info: dict[str, Any]) -> web.Response:
        opened = {"session": session.id, "hash": self._card["hash"], "task": info["task"]}
        return web.json_response({**opened, "messages": list(info["messages"])})

    async def _step(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = checked(PlayTurn, parse_json(await read_body(request)))
        result = await session.step(message_of(body), turn=body.turn)
        return web.json_response(step_body(result))

    async def _gold(self, request: web.Request) -> web.Response:
        session = self._session(request)
        if not self._is_owner(request):
            return _denied(
                "gold is for whoever owns the server, not for players",
                f"the server prints its owner_key: {OWNER_VARIABLE}=KEY, or the header "
                f"{OWNER_HEADER}",
                status=403,
            )
        return web.json_response({"action": session.env.gold_action()})

    async def _noop(self, request: web.Request) -> web.Response:
        return web.json_response({"action": self._session(request).noop_action()})

    async def _close(self, request: web.Request) -> web.Response:
        await self.sessions.close(request.match_info["session"])
        return web.json_response({})

    async def _image(self, request: web.Request) -> web.Response:
        """Answer with a picture that a message has named: who does not know its hash has none."""
        store, sha256 = image_store(), request.match_info["sha256"]
        if sha256 not in store:
            raise UsageError(f"the picture {sha256[:12]} is not here")
        return web.json_response({"png": base64.b64encode(store.read(sha256)).decode()})

    def _session(self, request: web.Request) -> Session:
        session = self.sessions.get(request.match_info["session"])
        request[_HAS_OPTIONS] = session.has_options
        return session


def _denied(why: str, *hints: str, status: int = 401) -> web.Response:
    error = {"kind": "denied", "message": why, "hints": list(hints)}
    return web.json_response({"error": error}, status=status)


@web.middleware
async def _tell_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestBodyError as error:
        _, body = error_body(error)
        status = error.status
    except GymError as error:
        status, body = error_body(error)
    except ConnectionError:
        raise  # the client is gone
    except web.HTTPException as error:  # no such route, too large a body
        _, body = error_body(UsageError(f"{request.method} {request.path}: {error.reason}"))
        status = error.status
    except Exception as error:
        status, body = error_body(EnvError(f"the environment failed: {error!r}"))
    if status == 500 and request.get(_HAS_OPTIONS, False):
        status = 422  # a task that the client made up: it need not be one of the environment's
    return web.Response(status=status, text=json.dumps(body), content_type="application/json")
