"""What one secret opens: the calls of one episode."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from areal_gym.engines.base import Generation, SamplingParams
from areal_gym.errors import AgentError, EngineError
from areal_gym.gateway.error_replies import ApiError
from areal_gym.gateway.grammar import Form
from areal_gym.gateway.request_parsing import Delta, Reader
from areal_gym.recording import ContextFullError, Conversations, Recorder, TurnDraft, derive_seed
from areal_gym.types import Message, StopReason

_MAX_REMEMBERED = 256
"""Calls whose answers are kept for retries."""
_MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """One call, whichever API it came through."""

    messages: Sequence[Message] = ()
    prompt: str | None = None
    """In place of messages: a text to go on with, without any chat template."""
    tools: Sequence[dict[str, Any]] = ()
    has_calls: bool = True
    """Whether calls in the answer are read as such; only where there are tools."""
    n: int = 1
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stops: Sequence[str] = ()
    form: Form | None = None
    """How the answer must look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One choice."""

    message: Message
    generation: Generation
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, those that were sent or sampled before."""
    stop: str | None = None
    """The stop string that ended it."""

    @property
    def is_cut(self) -> bool:
        """By a limit of tokens."""
        return self.generation.finish_reason == "length"


class EpisodeHandle(Protocol):
    """The episode that a session belongs to."""

    @property
    def first_messages(self) -> Sequence[Message]:
        """What opens the episode."""
        ...

    @property
    def tools(self) -> Sequence[Any]:
        """The environment's tools."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the environment has ended it."""
        ...

    async def call_tool(self, call_id: str) -> str:
        """See `Episode.call_tool`."""
        ...

    async def reply(self, answer: str) -> Sequence[Message]:
        """See `Episode.reply`."""
        ...

    def give_reward(self, reward: float, *, turn: TurnDraft | None = None) -> None:
        """Add to the reward of a turn, by default the last."""
        ...


@dataclass(slots=True, eq=False)
class _Call:
    """One request and who waits for it."""

    task: asyncio.Task[list[Completion]]
    num_waiting: int = 0
    is_delivered: bool = False

    def answers(self, is_retry: bool) -> bool:
        """Whether the same request, sent again, is to get the same answer."""
        if not self.task.done():
            return is_retry
        has_failed = self.task.cancelled() or self.task.exception() is not None
        return not has_failed and (is_retry or not self.is_delivered)


@dataclass(eq=False)
class Session:
    """Calls of one episode, and what has become of them; an `PolicyEndpoint` for its agent.

    A call whose client goes away is aborted, and leaves nothing behind: nobody has acted on it. One
    that was answered stays, and is answered again, from memory, when the client asks again.
    """

    recorder: Recorder
    base_url: str
    close_key: Callable[[Session], None]
    """Told when the secret is no longer good for anything."""
    group_id: str = ""
    max_calls: int | None = None
    is_training: bool = True
    """The run says how to sample; else the client does."""
    host: EpisodeHandle | None = None
    max_points: int | None = None
    id: str = field(default_factory=lambda: f"session-{secrets.token_hex(8)}")
    api_key: str = field(default_factory=lambda: f"ag-{secrets.token_urlsafe(24)}")
    limit: StopReason | None = None
    """The limit that the newest call has met."""
    trouble: EngineError | None = None
    """Why the newest call could not be answered."""
    was_asked_after_end: bool = False
    """The environment had ended the episode, and the policy was asked once more."""

    def __post_init__(self) -> None:
        self._conversations = Conversations(self.recorder, max_points=self.max_points)
        self._calls: OrderedDict[bytes, _Call] = OrderedDict()
        self._by_call_id: dict[str, Message] = {}
        self._turns: dict[str, TurnDraft] = {}
        self._num_tool_calls = 0
        self._histories: OrderedDict[str, list[Message]] = OrderedDict()
        self._claimed = asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: str | None = None
        self.offer: Callable[[Session], None] | None = None
        """Tells the gateway's lobby that programs outside may claim this session."""

    # ---- asking -------------------------------------------------------------------------------

    async def once(
        self,
        key: bytes,
        *,
        is_retry: bool,
        work: Callable[[], Coroutine[Any, Any, list[Completion]]],
    ) -> list[Completion]:
        """The answer to a request; the same request, sent again, gets the same answer.

        Sent again is what says so, or what repeats a request whose answer never arrived. Who asks
        the same twice without that wants two answers.
        """
        call = self._calls.get(key)
        if call is None or not call.answers(is_retry):
            call = _Call(asyncio.create_task(work()))
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

    def delivered(self, key: bytes) -> None:
        """The client has the whole answer."""
        if key in self._calls:
            self._calls[key].is_delivered = True

    async def answer(
        self, ask: CompletionRequest, show: Callable[[int, list[Delta]], None] | None = None
    ) -> list[Completion]:
        """Ask the policy, `n` times at once.

        Args:
            ask: what.
            show: told of new text of each answer, by its number.

        Raises:
            ApiError: a limit of the episode.
            ContextFullError: the prompt leaves no room.
            EngineError: the policy could not be sampled.
        """
        if self.host is not None and self.host.is_over:
            self.was_asked_after_end = True
            raise ApiError(
                400,
                "the environment has ended this episode: the policy is not asked any more "
                "(agents can tell by task.is_over, programs by GET /v1/rl/task)",
                code="episode_over",
            )
        if ask.form is not None and self.is_training:
            ask.form.refuse_training()
        if self.max_calls is not None and self.recorder.num_calls + ask.n > self.max_calls:
            self.limit = StopReason.MAX_TURNS
            raise ApiError(
                400,
                f"this episode has made its {self.max_calls} calls (agent.kwargs.max_calls)",
                code="episode_limit",
            )
        try:
            if ask.n == 1:
                answers = [await self._answer(ask, 0, show)]
            else:
                tasks = [asyncio.create_task(self._answer(ask, i, show)) for i in range(ask.n)]
                try:
                    answers = list(await asyncio.gather(*tasks))
                finally:
                    for task in tasks:
                        task.cancel()
        except ContextFullError:
            self.limit = StopReason.MAX_TOKENS
            raise
        except EngineError as error:
            self.trouble = error
            raise
        self.limit = self.trouble = None
        return answers

    async def _answer(
        self, ask: CompletionRequest, index: int, show: Callable[[int, list[Delta]], None] | None
    ) -> Completion:
        renderer = self.recorder.renderer
        dialect = renderer.tool_dialect if ask.tools and ask.has_calls else "plain"
        reader = Reader(renderer, dialect if ask.prompt is None else None, ask.stops)

        def hear(token_ids: tuple[int, ...]) -> int | None:
            taken = reader.hear(token_ids)
            if show is not None and (news := reader.news()):
                show(index, news)
            return taken

        known = self._conversations
        with (
            known.going_on(ask.messages, ask.tools, dialect)
            if ask.prompt is None
            else known.going_on_with_text(ask.prompt)
        ) as (dialogue, prompt):
            message, generation = await self.recorder.sample(
                dialogue,
                prompt,
                params=self._params(ask, dialect),
                seed=None if ask.seed is None else derive_seed(ask.seed & _MASK, index),
                hear=hear if show is not None or ask.stops else None,
                text=lambda: None if reader.stop is None else reader.text,
            )
        for call in message.get("tool_calls", ()):
            call["id"] = f"call{self._num_tool_calls:05d}"
            self._num_tool_calls += 1
            if self.host is not None:
                self._by_call_id[call["id"]] = message
        if show is not None and (rest := reader.rest(message)):
            show(index, rest)
        return Completion(
            message=message,
            generation=generation,
            num_prompt_tokens=len(prompt.token_ids),
            num_cached_tokens=prompt.num_kept,
            stop=reader.stop,
        )

    def _params(self, ask: CompletionRequest, dialect: str) -> SamplingParams:
        own = self.recorder.params
        limit = own.max_new_tokens
        if ask.max_new_tokens is not None:
            limit = min(limit, ask.max_new_tokens)
        if self.is_training:
            return replace(own, max_new_tokens=limit)
        engine, renderer = self.recorder.engine, self.recorder.renderer
        return replace(
            own,
            max_new_tokens=limit,
            temperature=own.temperature if ask.temperature is None else ask.temperature,
            top_p=own.top_p if ask.top_p is None else ask.top_p,
            top_k=own.top_k if ask.top_k is None else ask.top_k,
            grammar=None if ask.form is None else ask.form.grammar(engine, renderer, dialect),
        )

    def history(self, answer_id: str | None) -> list[Message]:
        """The messages up to an answer, for who sends only what is new.

        Raises:
            ApiError: there is no such answer.
        """
        if answer_id is None:
            return []
        if answer_id not in self._histories:
            raise ApiError(
                400,
                f"this session has given no answer {answer_id!r}, or long ago",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self._histories[answer_id]

    def keep_history(self, answer_id: str, messages: list[Message]) -> None:
        """Remember them for `history`."""
        self._histories[answer_id] = messages
        if len(self._histories) > _MAX_REMEMBERED:
            self._histories.popitem(last=False)

    # ---- the episode --------------------------------------------------------------------------

    def message_with(self, call_id: str) -> Message | None:
        """The policy's message with this tool call."""
        return self._by_call_id.get(call_id)

    def name(self, answer_id: str, answers: Sequence[Completion]) -> None:
        """Rewards for `answer_id` go to the first of these."""
        if self.host is not None:
            self._turns[answer_id] = self.recorder.turn_of(answers[0].message)

    def give_reward(self, reward: float, answer_id: str | None = None) -> None:
        """Add to the reward of an answer, by default the newest.

        Raises:
            ApiError: there is no such answer, or no episode.
        """
        if self.host is None:
            raise ApiError(400, "this session is no episode: nobody learns from it")
        if not self.recorder.turns:
            raise ApiError(400, "there is nothing to reward: the policy has not answered yet")
        turn = None if answer_id is None else self._turns.get(answer_id)
        if answer_id is not None and turn is None:
            raise ApiError(404, f"this session has given no answer {answer_id!r}")
        try:
            self.host.give_reward(reward, turn=turn)
        except AgentError as error:
            raise ApiError(400, str(error)) from None

    async def claimed(self) -> None:
        """See `PolicyEndpoint.claimed`."""
        assert self.offer is not None
        self.offer(self)
        await self._claimed.wait()

    async def ended(self) -> None:
        """See `PolicyEndpoint.ended`."""
        await self._ended.wait()
        if self._failure is not None:
            raise AgentError(f"the program says that it has failed: {self._failure}")

    def claim(self) -> None:
        """A program outside has opened the session."""
        self._claimed.set()

    def end(self, failure: str | None = None) -> None:
        """That program has ended it, and says so if it has failed."""
        self._failure = failure
        self._ended.set()
        self.close()

    def close(self) -> None:
        """The secret opens nothing any more; calls that are under way are aborted."""
        self.close_key(self)
        for call in self._calls.values():
            call.task.cancel()
        self._calls.clear()
