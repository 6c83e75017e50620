"""The gateway: an HTTP server before the policy.

    request -> key -> session -> ask -> session.answer -> format -> a response, or a stream
                |                            |
             401, 403                  400, 429, 503

Each episode has a session with a secret of its own, which is the `api_key` of whoever plays it.
Opening, rewarding and ending sessions from outside needs another secret, the control key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from aiohttp import web
from pydantic import BaseModel, ValidationError

from areal_gym.chat import Renderer
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.errors import InfrastructureError
from areal_gym.gateway.error_replies import ApiError, as_api_error
from areal_gym.gateway.request_parsing import Delta, deltas_of
from areal_gym.gateway.session import Completion, CompletionRequest, EpisodeHandle, Session
from areal_gym.gateway.session_queue import SessionQueue
from areal_gym.recording import InFlight, Recorder
from areal_gym.utils.http_servers.aiohttp_site import HttpSite, RequestBodyError
from areal_gym.utils.http_servers.connections import ConnectionLimits

MODEL = "policy"
"""What the policy is called. Any other name means it, too: programs have theirs built in."""


class Format(Protocol):
    """How one API writes answers."""

    id: str
    is_stream: bool
    last: bytes
    """What ends a stream."""

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of an answer that is no stream."""
        ...

    def begin(self) -> Iterable[dict[str, Any]]:
        """Events before the first text. Those with a `type` are named by it."""
        ...

    def show(self, index: int, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """Events for new text of choice `index`."""
        ...

    def end(self, answers: Sequence[Completion]) -> Iterable[dict[str, Any]]:
        """Events after the last text."""
        ...


class Gateway:
    """Serves sessions until it is closed.

    Args:
        host: where it listens; on loopback, programs of other machines cannot reach it.
        port: 0 is any that is free.
        control_key: for the control routes; made up by default.
        max_body_bytes: larger requests are refused.
        max_calls_at_once: more calls than these are told to come back later.
        limits: what one client can hold, and for how long; by default `ConnectionLimits()`.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        control_key: str | None = None,
        max_body_bytes: int = 16 * 2**20,
        max_calls_at_once: int = 16_384,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.control_key = control_key or f"agc-{secrets.token_urlsafe(24)}"
        self.is_paused = False
        """Calls are told to come back later."""
        self.num_calls = 0
        """Calls under way."""
        self.lobby = SessionQueue()
        """Episodes that programs outside may play."""
        self._host = host
        self._port = port
        self._max_body_bytes = max_body_bytes
        self._max_calls_at_once = max_calls_at_once
        self._sessions: dict[str, Session] = {}
        self._by_id: dict[str, Session] = {}
        self._limits = limits
        self._site: HttpSite | None = None

    @property
    def url(self) -> str:
        """Where it answers, without `/v1`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def sessions(self) -> dict[str, Session]:
        """Open sessions by their public id; read only."""
        return self._by_id

    async def start(self) -> None:
        """Listen.

        Raises:
            InfrastructureError: the port is taken.
        """
        from areal_gym.gateway.routes import routes_of

        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_errors])
        app.add_routes(routes_of(self))
        site = HttpSite(app, limits=self._limits, handler_cancellation=True)
        try:
            self._port = await site.start(self._host, self._port)
        except OSError as error:
            raise InfrastructureError(
                f"the gateway cannot listen at {self._host}:{self._port}: {error.strerror}",
                hints=["any free port: gateway=127.0.0.1:0"],
            ) from None
        self._site = site

    async def aclose(self) -> None:
        """End all sessions and stop listening. Idempotent."""
        for session in list(self._by_id.values()):
            session.close()
        site, self._site = self._site, None
        if site is not None:
            await site.aclose()

    def open_session(
        self,
        recorder: Recorder,
        *,
        group_id: str = "",
        max_calls: int | None = None,
        is_training: bool = True,
        host: EpisodeHandle | None = None,
        max_points: int | None = None,
        api_key: str | None = None,
    ) -> Session:
        """A new secret for what `recorder` records; arguments as those of `Session`."""
        session = Session(
            recorder=recorder,
            base_url=f"{self.url}/v1",
            close_key=self._forget,
            group_id=group_id,
            max_calls=max_calls,
            is_training=is_training,
            host=host,
            max_points=max_points,
        )
        session.offer = self.lobby.offer
        if api_key is not None:
            session.api_key = api_key
        self._sessions[session.api_key] = session
        self._by_id[session.id] = session
        return session

    def serve_policy(
        self, engine: Engine, renderer: Renderer, *, api_key: str | None = None
    ) -> Session:
        """A session that nobody learns from: clients say how to sample, little is kept."""
        params = SamplingParams(max_new_tokens=engine.max_context)
        recorder = Recorder(engine, renderer, params, in_flight=InFlight(), keeps=False)
        return self.open_session(recorder, is_training=False, max_points=4096, api_key=api_key)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.api_key, None)
        self._by_id.pop(session.id, None)
        self.lobby.withdraw(session)

    # ---- who asks -----------------------------------------------------------------------------

    def session_of(self, request: web.Request) -> Session:
        """The session whose secret the request has.

        Raises:
            ApiError: no secret, or none that is known.
        """
        key = key_of(request)
        session = self._sessions.get(key)
        if session is not None:
            return session
        if hmac.compare_digest(_bytes(key), _bytes(self.control_key)):
            raise ApiError(403, "the control key opens and ends sessions; ask with a session's key")
        raise ApiError(
            401,
            "no session has this key: it is wrong, or the session is over",
            code="invalid_api_key",
        )

    def require_control(self, request: web.Request) -> None:
        """Let nobody pass but who has the control key.

        Raises:
            ApiError: another key, or none.
        """
        key = key_of(request)
        if hmac.compare_digest(_bytes(key), _bytes(self.control_key)):
            return
        if key in self._sessions:
            raise ApiError(403, "a session's key does not open, reward or end sessions")
        raise ApiError(401, "this is not the control key", code="invalid_api_key")

    # ---- calls --------------------------------------------------------------------------------

    async def call(
        self,
        request: web.Request,
        session: Session,
        body: bytes,
        ask: CompletionRequest,
        format: Format,
        *,
        on_answer: Callable[[Completion], None] | None = None,
    ) -> web.StreamResponse:
        """Ask the policy, and answer in the API's format. `on_answer` is told of the first choice.

        Raises:
            ApiError: the policy cannot be asked now.
        """
        if self.is_paused or self.num_calls >= self._max_calls_at_once:
            why = "is paused" if self.is_paused else "has as many calls as it takes"
            raise ApiError(429, f"the gateway {why}; come back later", retry_after_s=1)
        key = hashlib.sha256(request.path.encode() + b"\0" + body).digest()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        news: asyncio.Queue[tuple[int, list[Delta]] | None] | None = None
        show = None
        if format.is_stream:
            news = asyncio.Queue()
            events = news

            def show(index: int, deltas: list[Delta]) -> None:
                events.put_nowait((index, deltas))

        async def answering() -> list[Completion]:
            answers = await session.once(
                key, is_retry=is_retry, work=lambda: session.answer(ask, show)
            )
            session.name(format.id, answers)
            if on_answer is not None:
                on_answer(answers[0])
            return answers

        self.num_calls += 1
        try:
            if news is None:
                response: web.StreamResponse = json_response(format.whole(await answering()))
                await response.prepare(request)
                await response.write_eof()
            else:
                response = await self._stream(request, answering(), news, format)
        finally:
            self.num_calls -= 1
        session.delivered(key)
        return response

    async def _stream(
        self,
        request: web.Request,
        answering: Awaitable[list[Completion]],
        news: asyncio.Queue[tuple[int, list[Delta]] | None],
        format: Format,
    ) -> web.StreamResponse:
        task = asyncio.ensure_future(answering)
        task.add_done_callback(lambda _: news.put_nowait(None))
        try:
            told = await news.get()
            if told is None and task.exception() is not None:
                await task  # an error before the first token has a status of its own
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            await response.prepare(request)
            events = list(format.begin())
            shown = set()
            while told is not None:
                shown.add(told[0])
                events += format.show(*told)
                if news.empty():
                    await response.write(b"".join(map(_event, events)))
                    events = []
                told = await news.get()
            try:
                answers = await task
                for index, answer in enumerate(answers):
                    if index not in shown:  # a retry, answered from memory
                        events += format.show(index, deltas_of(answer.message))
                events += format.end(answers)
            except Exception as error:
                events.append(as_api_error(error).to_openai())
            await response.write(b"".join(map(_event, events)) + format.last)
            await response.write_eof()
            return response
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def key_of(request: web.Request) -> str:
    """The secret in a request, as OpenAI's and Anthropic's clients send it.

    Raises:
        ApiError: there is none.
    """
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if key := request.headers.get("x-api-key", "").strip():
        return key
    raise ApiError(
        401, "no key: send Authorization: Bearer KEY, or x-api-key: KEY", code="missing_api_key"
    )


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def parse(model: type[BaseModel], body: bytes) -> Any:
    """The body of a request.

    Raises:
        ApiError: it is no JSON, or not what the route takes.
    """
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(
            400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None
        ) from None


def json_response(content: dict[str, Any], *, status: int = 200) -> web.Response:
    """JSON, in ASCII: a sampled text may hold what UTF-8 cannot."""
    return web.Response(
        status=status, body=json.dumps(content).encode(), content_type="application/json"
    )


def _event(event: dict[str, Any]) -> bytes:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestBodyError as error:
        failed = ApiError(error.status, error.message)
    except web.HTTPException as error:
        status = 404 if error.status == 404 else 405 if error.status == 405 else 400
        failed = ApiError(status, f"{request.method} {request.path}: {error.reason}")
    except ConnectionError:
        raise  # nobody is there to be told
    except Exception as error:
        failed = as_api_error(error)
    is_anthropic = request.path.startswith("/v1/messages")
    response = json_response(
        failed.to_anthropic() if is_anthropic else failed.to_openai(), status=failed.status
    )
    if failed.retry_after_s is not None:
        response.headers["Retry-After"] = str(failed.retry_after_s)
    return response
