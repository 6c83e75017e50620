"""The sessions of a gateway: whose secret is whose, and what may be called now."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

from aiohttp import web

from areal_gym.chat import Renderer
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.gateway.completions import Completion, CompletionRequest
from areal_gym.gateway.error_replies import ApiError
from areal_gym.gateway.http_messages import key_of
from areal_gym.gateway.reply_formats import ReplyFormat, TextQueue, send_stream, send_whole
from areal_gym.gateway.session import EpisodeHandle, Session, SessionOptions
from areal_gym.gateway.session_queue import SessionQueue
from areal_gym.gateway.text_stream import Delta
from areal_gym.recording import InFlight, Recorder

MODEL = "policy"
"""The policy's name. Any other name means it, too: programs have names built in."""


class SessionRegistry:
    """Opens sessions, finds the session of a request, and lets it call the policy.

    Args:
        control_key: the secret of the control routes; made up by default.
        max_calls_at_once: more calls than these are told to come back later.
    """

    def __init__(self, *, control_key: str | None = None, max_calls_at_once: int = 16_384) -> None:
        self.control_key = control_key or f"agc-{secrets.token_urlsafe(24)}"
        self.is_paused = False
        """Whether calls are told to come back later."""
        self.num_calls = 0
        """Calls under way."""
        self.queue = SessionQueue()
        """Episodes that external programs may play."""
        self.sessions: dict[str, Session] = {}
        """Open sessions by their public id."""
        self._by_key: dict[str, Session] = {}
        self._max_calls_at_once = max_calls_at_once

    @property
    def url(self) -> str:
        """The gateway's URL, without `/v1`."""
        raise NotImplementedError

    def open_session(
        self,
        recorder: Recorder,
        options: SessionOptions | None = None,
        *,
        episode: EpisodeHandle | None = None,
    ) -> Session:
        """Open a session, with a secret of its own.

        Args:
            recorder: records the session's calls.
            options: limits and names.
            episode: the episode that the session plays; without it there is only the policy.
        """
        session = Session(
            recorder,
            options or SessionOptions(),
            base_url=f"{self.url}/v1",
            episode=episode,
            on_offer=self.queue.offer,
            on_close=self._forget,
        )
        self._by_key[session.api_key] = session
        self.sessions[session.id] = session
        return session

    def serve_policy(
        self, engine: Engine, renderer: Renderer, *, api_key: str | None = None
    ) -> Session:
        """Open a session that is not trained on: clients say how to sample, little is kept."""
        params = SamplingParams(max_new_tokens=engine.max_context)
        recorder = Recorder(engine, renderer, params, in_flight=InFlight(), keeps=False)
        options = SessionOptions(is_training=False, max_points=4096, api_key=api_key)
        return self.open_session(recorder, options)

    def _forget(self, session: Session) -> None:
        self._by_key.pop(session.api_key, None)
        self.sessions.pop(session.id, None)
        self.queue.withdraw(session)

    # ---- secrets ------------------------------------------------------------------------------

    def session_of(self, request: web.Request) -> Session:
        """Return the session whose secret the request has.

        Raises:
            ApiError: there is no secret, or an unknown one.
        """
        key = key_of(request)
        session = self._by_key.get(key)
        if session is not None:
            return session
        if self._is_control_key(key):
            raise ApiError(403, "the control key opens and ends sessions; ask with a session's key")
        raise ApiError(
            401,
            "no session has this key: it is wrong, or the session is over",
            code="invalid_api_key",
        )

    def require_control(self, request: web.Request) -> None:
        """Check that the request has the control key.

        Raises:
            ApiError: it has another key, or none.
        """
        key = key_of(request)
        if self._is_control_key(key):
            return
        if key in self._by_key:
            raise ApiError(403, "a session's key does not open, reward or end sessions")
        raise ApiError(401, "this is not the control key", code="invalid_api_key")

    def _is_control_key(self, key: str) -> bool:
        return hmac.compare_digest(_bytes(key), _bytes(self.control_key))

    # ---- calls --------------------------------------------------------------------------------

    async def call(
        self,
        request: web.Request,
        session: Session,
        body: bytes,
        completion_request: CompletionRequest,
        format: ReplyFormat,
        *,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> web.StreamResponse:
        """Sample the policy, and reply in the API's format.

        Args:
            request: the HTTP request.
            session: its session.
            body: the request's body; the same body, sent again, gets the same reply.
            completion_request: the parsed body.
            format: writes the reply.
            on_completion: called with the first choice.

        Raises:
            ApiError: the policy cannot be asked now.
        """
        if self.is_paused or self.num_calls >= self._max_calls_at_once:
            why = "is paused" if self.is_paused else "has as many calls as it takes"
            raise ApiError(429, f"the gateway {why}; come back later", retry_after_s=1)
        key = hashlib.sha256(request.path.encode() + b"\0" + body).digest()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        texts = TextQueue() if format.is_stream else None

        def on_text(index: int, deltas: list[Delta]) -> None:
            if texts is not None:
                texts.put_nowait((index, deltas))

        async def complete() -> list[Completion]:
            completions = await session.complete_once(
                key,
                is_retry=is_retry,
                complete=lambda: session.complete(
                    completion_request, None if texts is None else on_text
                ),
            )
            session.remember_turn(format.id, completions)
            if on_completion is not None:
                on_completion(completions[0])
            return completions

        self.num_calls += 1
        try:
            if texts is None:
                response = await send_whole(request, complete(), format)
            else:
                response = await send_stream(request, complete(), texts, format)
        finally:
            self.num_calls -= 1
        session.mark_delivered(key)
        return response


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
