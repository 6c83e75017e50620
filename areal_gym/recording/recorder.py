"""Engine calls become turns and spans.

    dialogue.prompt(messages) -> Recorder.sample -> engine -> spans and a turn -> the message

One recorder belongs to one episode, whoever asks: the episode's own agent, or a program behind the
gateway. It knows nothing of messages being extended or rewritten; that is the business of a
`Dialogue` and, among several of them, of `Conversations`.

A call that fails, or that nobody waits for any more, leaves nothing behind: no span, no turn.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from areal_gym.chat import Dialogue, Prompt, Renderer
from areal_gym.engines.base import Engine, Generation, Piece, SamplingParams, stream_from
from areal_gym.errors import EngineError
from areal_gym.recording.raw import RawText
from areal_gym.types import FinishReason, Message, TokenSpan, Turn

_names = itertools.count()


@cache
def _packer(num: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{num}Q").pack


def derive_seed(*parts: int) -> int:
    """A 48-bit seed (JSON and every engine can hold it) that depends on all `parts`."""
    digest = hashlib.blake2b(_packer(len(parts))(*parts), digest_size=6).digest()
    return int.from_bytes(digest, "little")


@dataclass(slots=True)
class InFlight:
    """How many episodes are being played, and what they wait for."""

    episodes: int = 0
    engine: int = 0
    env: int = 0

    @property
    def agent(self) -> int:
        """Those that are in the agent's own code."""
        return self.episodes - self.engine - self.env


class ContextFullError(Exception):
    """The prompt leaves no room for an answer."""

    def __init__(self, num_tokens: int, max_context: int) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens, and the context is {max_context} tokens: "
            "there is no room for an answer"
        )


@dataclass(slots=True)
class TurnDraft:
    """A turn whose reward is not known yet."""

    finish_reason: FinishReason
    engine_s: float
    branch: int
    env_s: float = 0.0
    tool_s: float = 0.0
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)

    def turn(self) -> Turn:
        """What is known of it at the end."""
        return Turn(
            finish_reason=self.finish_reason,
            reward=self.reward,
            reward_parts=self.reward_parts,
            engine_s=self.engine_s,
            env_s=self.env_s,
            tool_s=self.tool_s,
        )


class Recorder:
    """Of one episode.

    Args:
        engine: samples the policy.
        renderer: messages to ids.
        params: how to sample, where the caller does not say; stop tokens are the renderer's.
        seed: of the episode.
        in_flight: counters to keep up to date.
        keeps: whether spans and turns are kept. Without, it only samples.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        params: SamplingParams,
        *,
        seed: int = 0,
        in_flight: InFlight | None = None,
        keeps: bool = True,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.params = params
        self.seed = seed
        self.name = f"episode-{next(_names)}"
        self.turns: list[TurnDraft] = []
        """In the order in which they ended."""
        self.messages: list[Message] = []
        """What was said, for reading."""
        self.num_calls = 0
        """Calls that were begun."""
        self._in_flight = in_flight or InFlight()
        self._keeps = keeps
        self._spans: list[TokenSpan] = []
        self._branches: dict[tuple[Dialogue | RawText, int], int] = {}
        self._names: dict[Dialogue | RawText, str] = {}
        self._numbers = itertools.count()
        self._turn_of: dict[int, int] = {}

    async def sample(
        self,
        dialogue: Dialogue | RawText,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        seed: int | None = None,
        hear: Callable[[tuple[int, ...]], int | None] | None = None,
        text: Callable[[], str | None] | None = None,
    ) -> tuple[Message, Generation]:
        """Let the policy answer, and take the answer into the dialogue.

        Args:
            dialogue: which gave the prompt, and is not used until this returns.
            prompt: what to send.
            params: how to sample; the episode's own by default.
            seed: the caller's; the same one gives the same answer in this episode. By default it
                depends on how many calls there have been.
            hear: told of new ids as they are sampled. None wants more; a number is how many of
                them it takes, and sampling ends there.
            text: asked at the end for what the agent takes of the answer; None is all of it.

        Raises:
            ContextFullError: there is no room for an answer.
            EngineError: the policy could not be sampled.
        """
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if len(prompt.token_ids) >= self.engine.max_context:
            raise ContextFullError(len(prompt.token_ids), self.engine.max_context)
        parts = (self.seed, number) if seed is None else (self.seed, seed, 1)
        asked = params or self.params
        params = SamplingParams(  # dataclasses.replace takes three times as long, in every turn
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=derive_seed(*parts),
            grammar=asked.grammar,
        )
        start_s = time.perf_counter()
        self._in_flight.engine += 1
        try:
            name = self._names.get(dialogue) or self._name_of(dialogue)
            if hear is None:
                generation = await self.engine.generate(prompt.token_ids, params, session=name)
            else:
                generation = await self._stream(prompt, params, name, hear)
        finally:
            self._in_flight.engine -= 1
        _check(generation)
        message = dialogue.answer(
            prompt, generation.token_ids, text=None if text is None else text()
        )
        if self._keeps:
            key = (dialogue, prompt.branch)
            branch = self._branches.setdefault(key, len(self._branches))
            self._keep(prompt, generation, branch, time.perf_counter() - start_s)
            self._turn_of[id(message)] = len(self.turns) - 1
            self.messages += [*prompt.messages, message]
        return message, generation

    def turn_of(self, message: Message) -> TurnDraft:
        """The turn that gave this message, else the newest one.

        Raises:
            IndexError: the policy has not answered yet.
        """
        return self.turns[self._turn_of.get(id(message), -1)]

    def forget(self, dialogue: Dialogue | RawText) -> None:
        """The dialogue will not go on."""
        name = self._names.pop(dialogue, None)
        if name is not None:
            self.engine.release(name)

    def release(self) -> None:
        """The episode is over: the engine may forget what it has cached."""
        for dialogue in list(self._names):
            self.forget(dialogue)

    def outcome(self) -> dict[str, Any]:
        """Spans, turns and messages, as fields of a trajectory.

        Branches come one after the other, in the order in which they ended, and turns are numbered
        in that order. So the branch that brings the episode to its end is the last one, and what
        it earns counts, discounted, for all who worked towards it.
        """
        order: Sequence[int] = range(len(self.turns))
        spans = self._spans
        if len(self._branches) > 1:
            ended = {turn.branch: index for index, turn in enumerate(self.turns)}
            rank = {branch: i for i, branch in enumerate(sorted(ended, key=ended.__getitem__))}
            order = sorted(order, key=lambda turn: rank[self.turns[turn].branch])
            place = {turn: index for index, turn in enumerate(order)}
            spans = [
                replace(span, turn=place[span.turn], branch=rank[span.branch])
                for span in sorted(spans, key=lambda span: rank[span.branch])
            ]
        return {
            "spans": tuple(spans),
            "turns": tuple([self.turns[i].turn() for i in order]),
            "messages": tuple(self.messages),
        }

    # ---- inside -------------------------------------------------------------------------------

    def _name_of(self, dialogue: Dialogue | RawText) -> str:
        """What the engine knows a new dialogue by; the first is named like the episode."""
        number = next(self._numbers)
        name = self._names[dialogue] = f"{self.name}/{number}" if number else self.name
        return name

    async def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        name: str,
        hear: Callable[[tuple[int, ...]], int | None],
    ) -> Generation:
        heard: list[Piece] = []
        finish_reason = None
        async with aclosing(stream_from(self.engine, prompt.token_ids, params, session=name)) as it:
            async for piece in it:
                num_taken = hear(piece.token_ids)
                finish_reason = piece.finish_reason
                if num_taken is not None:
                    finish_reason = FinishReason.STOP
                    piece = Piece(
                        token_ids=piece.token_ids[:num_taken],
                        logprobs=piece.logprobs[:num_taken],
                        versions=piece.versions[:num_taken],
                    )
                heard.append(piece)
                if finish_reason is not None:
                    break
        return Generation(
            token_ids=tuple(i for piece in heard for i in piece.token_ids),
            logprobs=tuple(p for piece in heard for p in piece.logprobs),
            versions=tuple(v for piece in heard for v in piece.versions),
            finish_reason=finish_reason or FinishReason.ABORT,
        )

    def _keep(self, prompt: Prompt, generation: Generation, branch: int, engine_s: float) -> None:
        turn = len(self.turns)
        self._spans.append(
            TokenSpan(
                origin="env" if prompt.num_kept else "prompt",
                token_ids=prompt.added,
                turn=turn,
                branch=branch,
            )
        )
        start = 0
        while start < len(generation.token_ids):  # one span per run of tokens with the same version
            version = generation.versions[start]
            end = bisect_right(generation.versions, version, lo=start)
            self._spans.append(
                TokenSpan(
                    origin="policy",
                    token_ids=generation.token_ids[start:end],
                    logprobs=generation.logprobs[start:end],
                    policy_version=version,
                    turn=turn,
                    branch=branch,
                )
            )
            start = end
        self.turns.append(TurnDraft(generation.finish_reason, engine_s, branch))


def _check(generation: Generation) -> None:
    """It can be recorded.

    Raises:
        EngineError: it cannot.
    """
    if generation.finish_reason is FinishReason.ABORT:
        raise EngineError("the engine aborted the turn")
    num_tokens, versions = len(generation.token_ids), generation.versions
    if not num_tokens:
        raise EngineError("the engine sampled no token")
    if len(versions) != num_tokens:
        raise EngineError("the engine must give one policy version per token")
    if len(generation.logprobs) != num_tokens:
        raise EngineError("the engine must give one log-probability per token")
    is_one = versions.count(versions[0]) == num_tokens  # mostly, and three times as quick
    if not is_one and sorted(versions) != list(versions):
        raise EngineError("the policy version went back inside a turn")
