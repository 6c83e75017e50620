"""A session: the completions of one episode, which a program requests with the session's secret."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote

from areal_gym.engines.base import SamplingParams
from areal_gym.errors import AgentError, EngineError
from areal_gym.gateway.completions import Completion, CompletionRequest
from areal_gym.gateway.http_messages import ApiError
from areal_gym.gateway.text_stream import Delta, TextStream
from areal_gym.recording import ContextFullError, Conversations, Recorder, TurnDraft, derive_seed
from areal_gym.types import Message, StopReason
from areal_gym.utils.http_servers.addresses import http_address

_MAX_REMEMBERED = 256
"""The number of requests whose completions are stored for retries."""
_MASK = 2**64 - 1

OnText = Callable[[int, list[Delta]], None]
"""Called with the index of a choice and its new text."""


class EpisodeHandle(Protocol):
    """The episode that a session plays: the part of `agents.base.Episode` that programs use."""

    @property
    def first_messages(self) -> Sequence[Message]:
        """The messages that open the episode."""

    @property
    def tools(self) -> Sequence[Any]:
        """The environment's tools."""

    @property
    def roles(self) -> Sequence[str]:
        """The roles that the policy plays."""

    @property
    def role(self) -> str | None:
        """The role whose turn it is."""

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended."""

    async def call_tool(self, call_id: str) -> str:
        """Return the output of a tool call."""

    async def reply(self, answer: str) -> Sequence[Message]:
        """Send a text to the environment, and return its reply."""

    def give_reward(self, reward: float, *, turn: TurnDraft | None = None) -> None:
        """Add to the reward of a turn; by default, it is the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """Limits and names of a session."""

    group_id: str = ""
    max_calls: int | None = None
    """The maximum number of completions."""
    is_training: bool = True
    """Whether completions are trained on, and the run sets the sampling; otherwise clients do."""
    max_points: int | None = None
    """The maximum number of stored completions that can be continued; see `Conversations`."""
    api_key: str | None = None
    """The session's secret; random by default."""


@dataclass(slots=True, eq=False)
class _Call:
    """The sampling of a request, and the number of connections that wait for it."""

    task: asyncio.Task[list[Completion]]
    num_waiting: int = 0
    is_delivered: bool = False
    """Whether a client has received the whole reply."""

    def is_reusable(self, is_retry: bool) -> bool:
        """Return whether an equal request gets these completions instead of new ones."""
        if not self.task.done():
            return is_retry
        has_failed = self.task.cancelled() or self.task.exception() is not None
        return not has_failed and (is_retry or not self.is_delivered)


class Session:
    """The calls of one episode; an agent gets it as its `PolicyEndpoint`.

    A call whose client disconnects is aborted and not recorded, because its completion was not
    used. The completions of a finished call are stored, so a client that retries gets them again.
    Without an `episode`, only the policy is served. `on_offer` lets external programs claim the
    session, `on_close` makes its secret invalid, and `on_listen` serves it at a listening socket.
    """

    def __init__(
        self,
        recorder: Recorder,
        options: SessionOptions,
        *,
        base_url: str,
        episode: EpisodeHandle | None,
        on_offer: Callable[[Session], None],
        on_close: Callable[[Session], None],
        on_listen: Callable[[Session, socket.socket], Awaitable[Callable[[], None]]],
    ) -> None:
        self.recorder = recorder
        self.options = options
        self.base_url = base_url
        self.episode = episode
        self.id = f"session-{secrets.token_hex(8)}"
        self.api_key = options.api_key or f"ag-{secrets.token_urlsafe(24)}"
        self.limit: StopReason | None = None
        """The limit that the newest call has reached, if any."""
        self.error: EngineError | None = None
        """The error of the newest call, if it failed."""
        self.was_called_after_end = False
        """Whether the policy was called after the environment had ended the episode."""
        self._on_offer = on_offer
        self._on_close = on_close
        self._on_listen = on_listen
        self._stops: list[Callable[[], None]] = []
        self._conversations: dict[str | None, Conversations] = {}
        self._calls: OrderedDict[bytes, _Call] = OrderedDict()
        self._by_call_id: dict[str, Message] = {}
        self._turns: dict[str, TurnDraft] = {}
        self._num_tool_calls = 0
        self._histories: OrderedDict[str, list[Message]] = OrderedDict()
        self._claimed = asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: str | None = None

    # ---- completions --------------------------------------------------------------------------

    async def complete_once(
        self,
        key: bytes,
        *,
        is_retry: bool,
        complete: Callable[[], Coroutine[Any, Any, list[Completion]]],
    ) -> list[Completion]:
        """Return the completions of a request; a retry gets the same ones.

        A request is a retry if its header says so, or if it equals one (by the hash `key`) whose
        reply was not delivered. Other equal requests get new completions.
        """
        call = self._calls.get(key)
        if call is None or not call.is_reusable(is_retry):
            call = _Call(asyncio.create_task(complete()))
            self._calls[key] = call
            self._calls.move_to_end(key)
            while len(self._calls) > _MAX_REMEMBERED:
                self._calls.popitem(last=False)
        call.num_waiting += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.num_waiting -= 1
            if not call.num_waiting and not call.task.done():
                call.task.cancel()

    def mark_delivered(self, key: bytes) -> None:
        """Record that the client has received the whole reply."""
        if key in self._calls:
            self._calls[key].is_delivered = True

    async def complete(
        self, request: CompletionRequest, on_text: OnText | None = None
    ) -> list[Completion]:
        """Sample `request.n` completions concurrently; `on_text` is called with new text meanwhile.

        Raises:
            ApiError: a limit of the episode is reached, or the episode has ended.
            ContextFullError: the prompt leaves no room for new tokens.
            EngineError: the policy could not be sampled.
        """
        self._check_limits(request)
        try:
            completions = await self._complete_all(request, on_text)
        except ContextFullError:
            self.limit = StopReason.MAX_TOKENS
            raise
        except EngineError as error:
            self.error = error
            raise
        self.limit = self.error = None
        return completions

    def base_url_of(self, role: str, base_url: str | None = None) -> str:
        """Return the URL at which a role calls the policy; `base_url` ends with `/v1`."""
        base = (base_url or self.base_url).removesuffix("/v1")
        return f"{base}/role/{quote(role, safe='')}/v1"

    def require_role(self, role: str | None) -> None:
        """Raise ApiError unless the call names one of the episode's roles, if it has any."""
        roles = () if self.episode is None else self.episode.roles
        if role in (roles or (None,)):
            return
        problem = "the call names none" if role is None else f"{role!r} is none of them"
        urls = ", ".join(map(self.base_url_of, roles))
        raise ApiError(
            400 if role is None else 404,
            f"the policy plays the roles {', '.join(roles)}, and {problem}; each has a base_url: "
            f"{urls}"
            if roles
            else f"this session has no role {role!r}: its base_url is {self.base_url}",
            code="unknown_role",
        )

    def _check_limits(self, request: CompletionRequest) -> None:
        self.require_role(request.role)
        if self.episode is not None and self.episode.is_over:
            self.was_called_after_end = True
            raise ApiError(
                400,
                "the environment has ended this episode: the policy is not asked any more "
                "(agents can tell by task.is_over, programs by GET /v1/rl/task)",
                code="episode_over",
            )
        if request.constraint is not None and self.options.is_training:
            request.constraint.refuse_training()
        max_calls = self.options.max_calls
        if max_calls is not None and self.recorder.num_calls + request.n > max_calls:
            self.limit = StopReason.MAX_TURNS
            raise ApiError(
                400,
                f"this episode has made its {max_calls} calls (agent.kwargs.max_calls)",
                code="episode_limit",
            )

    async def _complete_all(
        self, request: CompletionRequest, on_text: OnText | None
    ) -> list[Completion]:
        if request.n == 1:  # making a task would take as long as the rest of a short call
            return [await self._complete(request, 0, on_text)]
        tasks = [asyncio.create_task(self._complete(request, i, on_text)) for i in range(request.n)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(
        self, request: CompletionRequest, index: int, on_text: OnText | None
    ) -> Completion:
        renderer = self.recorder.renderer
        dialect = renderer.tool_dialect if request.tools and request.has_calls else "plain"
        stream = TextStream(renderer, dialect if request.prompt is None else None, request.stops)

        def on_tokens(token_ids: Sequence[int]) -> int | None:
            num_kept = stream.add(token_ids)
            if on_text is not None and (deltas := stream.new_deltas()):
                on_text(index, deltas)
            return num_kept

        if request.role not in self._conversations:
            points = self.options.max_points
            self._conversations[request.role] = Conversations(self.recorder, max_points=points)
        conversations = self._conversations[request.role]
        with (
            conversations.continued(request.messages, request.tools, dialect)
            if request.prompt is None
            else conversations.continued_text(request.prompt)
        ) as (dialogue, prompt):
            stream.is_thinking = renderer.is_inside_thought(prompt.token_ids)
            message, generation = await self.recorder.sample(
                dialogue,
                prompt,
                params=self._params(request, dialect),
                seed=None if request.seed is None else derive_seed(request.seed & _MASK, index),
                on_tokens=on_tokens if on_text is not None or request.stops else None,
                text=lambda: None if stream.stop is None else stream.text,
                role=request.role,
            )
        for call in message.get("tool_calls", ()):
            if not renderer.template.style.has_named_ids or call["id"] in self._by_call_id:
                call["id"] = f"call{self._num_tool_calls:05d}"
            self._num_tool_calls += 1
            if self.episode is not None:
                self._by_call_id[call["id"]] = message
        if on_text is not None and (deltas := stream.remaining_deltas(message)):
            on_text(index, deltas)
        return Completion(
            message=message,
            generation=generation,
            num_prompt_tokens=len(prompt.token_ids),
            num_cached_tokens=prompt.num_kept,
            stop=stream.stop,
        )

    def _params(self, request: CompletionRequest, dialect: str) -> SamplingParams:
        params = self.recorder.params
        if request.max_new_tokens is not None:
            limit = min(params.max_new_tokens, request.max_new_tokens)
            params = replace(params, max_new_tokens=limit)
        if self.options.is_training:
            return params
        if request.constraint is not None:
            engine, renderer = self.recorder.engine, self.recorder.renderer
            grammar = request.constraint.grammar(engine, renderer, dialect)
            params = replace(params, grammar=grammar)
        fields = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
        return replace(params, **{k: v for k, v in fields.items() if v is not None})

    def history(self, reply_id: str | None) -> list[Message]:
        """Return the messages up to a reply, for clients that send only new ones, or ApiError."""
        if reply_id is None:
            return []
        if reply_id not in self._histories:
            raise ApiError(
                400,
                f"this session has given no answer {reply_id!r}, or long ago",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self._histories[reply_id]

    def keep_history(self, reply_id: str, messages: list[Message]) -> None:
        """Store the messages up to a reply for `history`."""
        self._histories[reply_id] = messages
        if len(self._histories) > _MAX_REMEMBERED:
            self._histories.popitem(last=False)

    # ---- the episode --------------------------------------------------------------------------

    def message_with(self, call_id: str) -> Message | None:
        """Return the policy's message that has this tool call; None if there is none."""
        return self._by_call_id.get(call_id)

    def remember_turn(self, reply_id: str, completions: Sequence[Completion]) -> None:
        """Assign later rewards for `reply_id` to the turn of the first completion."""
        if self.episode is not None:
            self._turns[reply_id] = self.recorder.turn_of(completions[0].message)

    def give_reward(self, reward: float, reply_id: str | None = None) -> None:
        """Add to a reply's reward, by default the newest; raise ApiError if there is none."""
        if self.episode is None:
            raise ApiError(400, "this session plays no episode: it is not trained on")
        if not self.recorder.turns:
            raise ApiError(400, "there is nothing to reward: the policy has not answered yet")
        turn = None if reply_id is None else self._turns.get(reply_id)
        if reply_id is not None and turn is None:
            raise ApiError(404, f"this session has given no answer {reply_id!r}")
        try:
            self.episode.give_reward(reward, turn=turn)
        except AgentError as error:
            raise ApiError(400, str(error)) from None

    @property
    def num_calls(self) -> int:
        """The number of completions so far."""
        return self.recorder.num_calls

    async def listen_at(self, listener: socket.socket) -> str:
        """Serve only this session at a listening socket until it is closed; return the base URL."""
        host, port = listener.getsockname()[:2]
        self._stops.append(await self._on_listen(self, listener))
        return f"{http_address(host, port)}/v1"

    async def claimed(self) -> None:
        """Offer the episode to external programs, and wait until one has opened it."""
        self._on_offer(self)
        await self._claimed.wait()

    async def ended(self) -> None:
        """Wait until the program ends the episode; raise AgentError if it reports a failure."""
        await self._ended.wait()
        if self._failure is not None:
            raise AgentError(f"the program says that it has failed: {self._failure}")

    def claim(self) -> None:
        """Record that an external program has opened the session."""
        self._claimed.set()

    def end(self, failure: str | None = None) -> None:
        """End the session for its program, which may report a failure."""
        self._failure = failure
        self._ended.set()
        self.close()

    def close(self) -> None:
        """Make the secret invalid, and abort the calls in progress."""
        self._on_close(self)
        if self._stops:  # a program in a place, which may have rewritten its history
            branches = {turn.branch for turn in self.recorder.turns}
            self.recorder.metrics["forks"] = max(0, len(branches) - 1)
        for stop in self._stops:
            stop()
        for call in self._calls.values():
            call.task.cancel()
        self._calls.clear()
