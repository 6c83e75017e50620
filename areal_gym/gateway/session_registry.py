"""The sessions of a gateway: find the session of a request's key, and call the policy for it."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable
from contextvars import ContextVar

from aiohttp import web

from areal_gym.chat import Renderer
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.gateway.completions import Completion, CompletionRequest
from areal_gym.gateway.http_messages import ApiError, json_response, key_of
from areal_gym.gateway.reply_formats import ReplyFormat, TextQueue, send_stream
from areal_gym.gateway.session import EpisodeHandle, Session, SessionOptions
from areal_gym.gateway.text_stream import Delta
from areal_gym.recording import InFlight, Recorder
from areal_gym.utils.http_servers.addresses import is_same_secret

MODEL = "policy"
"""The policy's name in `/v1/models`. Requests may have any model name, as programs often have
built-in ones."""


BOUND_SESSION: ContextVar[Session | None] = ContextVar("areal_gym_bound_session", default=None)
"""The only session that the current request may use; None if it may use any."""

_MAX_NAMED = 4096
"""The number of groups whose task is stored."""


class SessionRegistry:
    """Opens sessions, finds the session of a request, and lets it call the policy.

    Sessions of episodes that wait for an external program are offered to programs that open
    sessions. Advantages compare the episodes of a group with each other. A program therefore names
    the task that it tries, by any text, and sessions with the same name get into the same group.
    Sessions without a name fill groups in the order in which they are opened.

    Args:
        control_key: the secret of the control routes; random by default.
        max_calls_at_once: the number of concurrent calls above which status 429 is returned.
    """

    def __init__(self, *, control_key: str | None = None, max_calls_at_once: int = 16_384) -> None:
        self.control_key = control_key or f"agc-{secrets.token_urlsafe(24)}"
        self.is_paused = False
        """Whether calls are refused with status 429 for now."""
        self.num_calls = 0
        """The number of calls in progress."""
        self.url = ""
        """The gateway's URL, without `/v1`, once it listens."""
        self.sessions: dict[str, Session] = {}
        """Open sessions by their public id."""
        self._by_key: dict[str, Session] = {}
        self.offers: list[Session] = []
        """Sessions that external programs may claim."""
        self._tasks: dict[str, str | None] = {}
        """The task's name by group, for groups that have a claimed session."""
        self._max_calls_at_once = max_calls_at_once

    def open_session(
        self,
        recorder: Recorder,
        options: SessionOptions | None = None,
        *,
        episode: EpisodeHandle | None = None,
    ) -> Session:
        """Open a session that plays `episode`; without an episode, only the policy is served."""
        session = Session(
            recorder,
            options or SessionOptions(),
            base_url=f"{self.url}/v1",
            episode=episode,
            on_offer=self.offers.append,
            on_close=self._forget,
            on_listen=self.listen_for,
        )
        self._by_key[session.api_key] = session
        self.sessions[session.id] = session
        return session

    def serve_policy(
        self, engine: Engine, renderer: Renderer, *, api_key: str | None = None
    ) -> Session:
        """Open a session that is not trained on and not recorded; clients set the sampling."""
        params = SamplingParams(max_new_tokens=engine.max_context)
        recorder = Recorder(engine, renderer, params, in_flight=InFlight(), keeps=False)
        options = SessionOptions(is_training=False, max_points=4096, api_key=api_key)
        return self.open_session(recorder, options)

    async def listen_for(self, session: Session, listener: socket.socket) -> Callable[[], None]:
        """Serve only this session at a socket, and return a function that stops it."""
        raise NotImplementedError

    def _forget(self, session: Session) -> None:
        self._by_key.pop(session.api_key, None)
        self.sessions.pop(session.id, None)
        if session in self.offers:
            self.offers.remove(session)

    def claim(self, task: str | None) -> Session:
        """Claim a session of a group with this task, or of a group without a claimed session.

        Raises ApiError if no session is free now.
        """
        claimed = None
        for session in self.offers:
            group = session.options.group_id
            if group not in self._tasks:
                claimed = claimed or session
            elif self._tasks[group] == task:
                claimed = session
                break
        if claimed is None:
            message = "no episode is free: all are being played, or training has to catch up first"
            raise ApiError(429, message, retry_after_s=1)
        self.offers.remove(claimed)
        self._tasks[claimed.options.group_id] = task
        if len(self._tasks) > _MAX_NAMED:
            del self._tasks[next(iter(self._tasks))]
        claimed.claim()
        return claimed

    # ---- secrets ------------------------------------------------------------------------------

    def session_of(self, request: web.Request) -> Session:
        """Return the session of the request's key; raise ApiError if there is none."""
        key = key_of(request)
        bound = BOUND_SESSION.get()
        if key in self._by_key and bound in (None, self._by_key[key]):
            return self._by_key[key]
        if is_same_secret(key, self.control_key):
            raise ApiError(403, "the control key opens and ends sessions; ask with a session's key")
        raise ApiError(
            401,
            "no session has this key: it is wrong, or the session is over",
            code="invalid_api_key",
        )

    def require_control(self, request: web.Request) -> None:
        """Raise ApiError unless the request has the control key."""
        key = key_of(request)
        if is_same_secret(key, self.control_key) and BOUND_SESSION.get() is None:
            return
        if key in self._by_key:
            raise ApiError(403, "a session's key does not open, reward or end sessions")
        raise ApiError(401, "this is not the control key", code="invalid_api_key")

    # ---- calls --------------------------------------------------------------------------------

    async def call(
        self,
        request: web.Request,
        session: Session,
        body: bytes,
        completion_request: CompletionRequest,
        format: ReplyFormat,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> web.StreamResponse:
        """Sample the policy, and reply in the API's format.

        A retry with the same `body` gets the same completions. `on_completion` is called with the
        first of them.

        Raises:
            ApiError: the gateway is paused, or it has too many calls in progress.
        """
        if self.is_paused or self.num_calls >= self._max_calls_at_once:
            reason = "is paused" if self.is_paused else "has as many calls as it takes"
            raise ApiError(429, f"the gateway {reason}; come back later", retry_after_s=1)
        key = hashlib.sha256(request.path.encode() + b"\0" + body).digest()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        texts = TextQueue()

        def on_text(index: int, deltas: list[Delta]) -> None:
            texts.put_nowait((index, deltas))

        async def complete() -> list[Completion]:
            completions = await session.complete_once(
                key,
                is_retry=is_retry,
                complete=lambda: session.complete(
                    completion_request, on_text if format.is_stream else None
                ),
            )
            session.remember_turn(format.id, completions)
            if on_completion is not None:
                on_completion(completions[0])
            return completions

        response: web.StreamResponse
        self.num_calls += 1
        try:
            if format.is_stream:
                response = await send_stream(request, complete(), texts, format)
            else:
                response = json_response(format.body(await complete()))
                await response.prepare(request)
                await response.write_eof()
        finally:
            self.num_calls -= 1
        session.mark_delivered(key)
        return response
