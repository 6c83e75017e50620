"""Turns engine calls into token spans and turns.

    dialogue.prompt(messages) -> Recorder.sample -> engine -> spans and a turn -> the message

One recorder belongs to one episode, whether its agent asks the policy or a program behind the
gateway does. It does not know whether messages extend or rewrite the history: a `Dialogue` does,
and `Conversations` choose between several dialogues.

A call that fails or is cancelled leaves no span and no turn.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from areal_gym.chat import Dialogue, Prompt, Renderer
from areal_gym.engines.base import (
    Engine,
    Generation,
    ImageEngine,
    Piece,
    SamplingParams,
    stream_from,
)
from areal_gym.errors import AgentError, ConfigError, EngineError
from areal_gym.images import image_limits
from areal_gym.recording.record import EpisodeRecord, TurnDraft
from areal_gym.types import FinishReason, Message, RoutedExperts, TokenSpan, text_of
from areal_gym.utils.packed_numbers import Floats, Ints

_names = itertools.count()


def derive_seed(*parts: int) -> int:
    """Return a 48-bit seed, which JSON and every engine can hold, that depends on all `parts`."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}Q", *parts), digest_size=6).digest()
    return int.from_bytes(digest, "little")


@dataclass(slots=True)
class InFlight:
    """Counts the episodes in flight, and what they wait for."""

    episodes: int = 0
    engine: int = 0
    env: int = 0

    @property
    def agent(self) -> int:
        """Episodes in the agent's own code."""
        return self.episodes - self.engine - self.env


class RawText:
    """A text that is written in turns; as in a `Dialogue`, sampled ids are never encoded again."""

    def __init__(self, renderer: Renderer) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self._renderer = renderer

    def prompt(self, text: str) -> Prompt:
        """Return the prompt after which the policy continues `text`, which extends this text."""
        new: list[Message] = [{"role": "user", "content": text[len(self.text) :]}]
        added = tuple(self._renderer.tokenizer.encode(text[len(self.text) :]))
        vision = self._renderer.vision
        if vision is not None and not {*vision.banned_ids}.isdisjoint(added):
            raise ConfigError(f"a text has {vision.placeholder}, which stands for an image")
        return Prompt((*self.token_ids, *added), added, 0, new)

    def answer(
        self, prompt: Prompt, sampled_ids: Sequence[int], *, text: str | None = None
    ) -> Message:
        """Append the tokens that the policy sampled after `prompt`."""
        if text is None:
            text = self._renderer.decode(sampled_ids)
        self.token_ids += [*prompt.added, *sampled_ids]
        self.text += text_of(prompt.messages[0]["content"]) + text
        return {"role": "assistant", "content": text}


class ContextFullError(Exception):
    """The prompt leaves no room for an answer, or has more images than are allowed."""


class Recorder(EpisodeRecord):
    """The record of an episode whose policy is sampled by an engine.

    Args:
        engine: samples the policy.
        renderer: turns messages into token ids.
        params: the default sampling parameters; stop tokens are the renderer's.
        seed: the episode's seed.
        in_flight: counters to keep up to date.
        keeps: whether spans and turns are recorded, and not only sampled.
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
        super().__init__()
        self.engine = engine
        self.renderer = renderer
        self.params = params
        self.seed = seed
        self.name = f"episode-{next(_names)}"
        self.num_calls = 0  # calls that have started
        self.in_flight = in_flight or InFlight()
        self._keeps = keeps
        self._branches: dict[tuple[Dialogue | RawText, int], int] = {}
        # The engine's session of each dialogue; the first is named like the episode.
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
        on_tokens: Callable[[Sequence[int]], int | None] | None = None,
        text: Callable[[], str | None] | None = None,
        role: str | None = None,
    ) -> tuple[Message, Generation]:
        """Let the policy answer, and append the answer to the dialogue.

        Args:
            dialogue: the dialogue of the prompt, which must not be used until this returns.
            prompt: the prompt to send.
            params: sampling parameters; by default the episode's.
            seed: the same seed gives the same answer in this episode. By default it depends on the
                number of calls so far.
            on_tokens: called with new ids as they are sampled. If it returns a number, that many
                of them are kept, and sampling ends there.
            text: called at the end; returns the answer's text if it was cut, else None.
            role: the role that answers, in episodes of several roles.

        Raises:
            ContextFullError: there is no room for an answer, or there are too many images.
            EngineError: sampling failed.
        """
        if prompt.images and not getattr(self.engine, "takes_images", False):
            raise ConfigError(
                f"the prompt has images, and {type(self.engine).__name__} takes only text",
                hints=["serve the vision-language model with an engine that takes images"],
            )
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if len(prompt.token_ids) >= (most := self.engine.max_context):
            raise ContextFullError(
                f"the prompt has {len(prompt.token_ids)} tokens, and the context is {most} tokens: "
                "there is no room for an answer"
            )
        if len(prompt.images) > (most := image_limits().max_images):
            raise ContextFullError(
                f"the prompt has {len(prompt.images)} images, and images.max_images is {most}"
            )
        parts = (self.seed, number) if seed is None else (self.seed, seed, 1)
        params = replace(
            params or self.params,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=derive_seed(*parts),
        )
        start_s = time.perf_counter()
        self.in_flight.engine += 1
        try:
            if dialogue not in self._names:
                name_number = next(self._numbers)
                self._names[dialogue] = f"{self.name}/{name_number}" if name_number else self.name
            name = self._names[dialogue]
            if on_tokens is None:
                generation = await self._generate(prompt, params, name)
            else:
                generation = await self._stream(prompt, params, name, on_tokens)
        finally:
            self.in_flight.engine -= 1
        _check(generation)
        message = dialogue.answer(
            prompt, generation.token_ids, text=None if text is None else text()
        )
        if self._keeps:
            key = (dialogue, prompt.branch)
            branch = self._branches.setdefault(key, len(self._branches))
            self._keep(prompt, generation, branch, time.perf_counter() - start_s)
            self.turns[-1].role = role
            self._turn_of[id(message)] = len(self.turns) - 1
            self.messages += [*prompt.messages, message]
        return message, generation

    async def _generate(self, prompt: Prompt, params: SamplingParams, name: str) -> Generation:
        engine = self.engine
        if prompt.images and isinstance(engine, ImageEngine):
            return await engine.generate(
                prompt.token_ids, params, session=name, images=prompt.images
            )
        return await engine.generate(prompt.token_ids, params, session=name)

    def add_fixed_turn(
        self, role: str, read: Sequence[Message], message: Message, engine_s: float
    ) -> TurnDraft:
        """Record a turn of a role that is not trained: its messages, but no tokens."""
        branches = {turn.role: turn.branch for turn in self.turns if turn.is_fixed}
        branch = branches.get(role, -1 - len(branches))
        turn = TurnDraft(FinishReason.STOP, engine_s, branch, role=role, is_fixed=True)
        self.turns.append(turn)
        self._turn_of[id(message)] = len(self.turns) - 1
        self.messages += [*read, message]
        return turn

    def turn_of(self, message: Message, role: str | None = None) -> TurnDraft:
        """Return the turn of this message, else the role's latest turn.

        Raises:
            AgentError: the role has no turn.
        """
        if id(message) in self._turn_of:
            return self.turns[self._turn_of[id(message)]]
        for turn in reversed(self.turns):
            if turn.role == role and not turn.is_fixed:
                return turn
        role_note = "" if role is None else f" as the role {role!r}, whose turn it is"
        raise AgentError(f"the agent acts before it has asked the policy{role_note}")

    def forget(self, dialogue: Dialogue | RawText) -> None:
        """Release the engine's cache of a dialogue that will not continue."""
        name = self._names.pop(dialogue, None)
        if name is not None:
            self.engine.release(name)

    def release(self) -> None:
        """Release the engine's cache of all dialogues of the episode."""
        for dialogue in list(self._names):
            self.forget(dialogue)

    async def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        name: str,
        on_tokens: Callable[[Sequence[int]], int | None],
    ) -> Generation:
        pieces: list[Piece] = []
        finish_reason = None
        stream = stream_from(
            self.engine, prompt.token_ids, params, session=name, images=prompt.images
        )
        async with aclosing(stream):
            async for piece in stream:
                num_kept = on_tokens(piece.token_ids)
                finish_reason = piece.finish_reason
                if num_kept is not None:
                    finish_reason = FinishReason.STOP
                    piece = Piece(
                        token_ids=piece.token_ids[:num_kept],
                        logprobs=piece.logprobs[:num_kept],
                        versions=piece.versions[:num_kept],
                        routed_experts=piece.routed_experts and piece.routed_experts[:num_kept],
                    )
                pieces.append(piece)
                if finish_reason is not None:
                    break
        return Generation(
            token_ids=Ints.joined(piece.token_ids for piece in pieces),
            logprobs=Floats.joined(piece.logprobs for piece in pieces),
            versions=tuple(v for piece in pieces for v in piece.versions),
            finish_reason=finish_reason or FinishReason.ABORT,
            routed_experts=RoutedExperts.joined(p.routed_experts for p in pieces if p.token_ids),
        )

    def _keep(self, prompt: Prompt, generation: Generation, branch: int, engine_s: float) -> None:
        span = partial(TokenSpan, turn=len(self.turns), branch=branch)
        self._spans.append(
            span(
                origin="env" if prompt.num_kept else "prompt",
                token_ids=prompt.added,
                images=prompt.added_images,
            )
        )
        start = 0
        while start < len(generation.token_ids):  # one span per run of tokens with the same version
            version = generation.versions[start]
            end = bisect_right(generation.versions, version, lo=start)
            experts = generation.routed_experts
            self._spans.append(
                span(
                    origin="policy",
                    token_ids=generation.token_ids[start:end],
                    logprobs=generation.logprobs[start:end],
                    policy_version=version,
                    routed_experts=experts and experts[start:end],
                )
            )
            start = end
        self.turns.append(TurnDraft(generation.finish_reason, engine_s, branch))


def _check(generation: Generation) -> None:
    if generation.finish_reason is FinishReason.ABORT:
        raise EngineError("the engine aborted the turn")
    num_tokens, versions = len(generation.token_ids), generation.versions
    if not num_tokens:
        raise EngineError("the engine sampled no token")
    if len(versions) != num_tokens:
        raise EngineError("the engine must give one policy version per token")
    if len(generation.logprobs) != num_tokens:
        raise EngineError("the engine must give one log-probability per token")
    if generation.routed_experts is not None and len(generation.routed_experts) != num_tokens:
        raise EngineError("an engine that reports experts must report those of each token")
    if sorted(versions) != list(versions):
        raise EngineError("the policy version decreased within a turn")
