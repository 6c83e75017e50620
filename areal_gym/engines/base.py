"""The engine contract: token ids in; token ids, log-probabilities and policy version out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from areal_gym.types import FinishReason

if TYPE_CHECKING:  # the protocol names tensors, but importing torch is the engine's business
    import torch

__all__ = [
    "Engine",
    "Generation",
    "Grammar",
    "GrammarEngine",
    "InterruptedEngine",
    "LocalEngine",
    "Piece",
    "RemoteEngine",
    "SamplingParams",
    "StreamingEngine",
    "WeightServer",
    "stream_from",
    "stream_in_chunks",
]


Grammar = tuple[Literal["json_schema", "structural_tag"], str]
"""What alone may be written, as JSON text: a JSON schema, or xgrammar's structural tag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample one turn."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    """0 is greedy; its log-probabilities are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends with, and includes, the first of these."""
    seed: int | None = None
    """Same seed, prompt and weights give the same tokens, whatever else is in the batch."""
    grammar: Grammar | None = None
    """Only engines that are a `GrammarEngine` keep to it. Log-probabilities are then those of what
    it leaves, and not the policy's."""


@dataclass(kw_only=True, slots=True)
class Generation:
    """What the policy sampled for one prompt; read at once, and not kept."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the sampling distribution, one per token."""
    versions: tuple[int, ...]
    """The policy version that sampled each token; weights may be published inside a turn."""
    finish_reason: FinishReason


@runtime_checkable
class Engine(Protocol):
    """Serves one policy to many concurrent callers on one event loop.

    A class that a run can name (`engine.id`) also has the class method
    `from_settings(policy: Path, settings: EngineConfig) -> Engine`.
    """

    @property
    def policy_version(self) -> int:
        """The version of the weights that sample now."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and new ones together, that one sequence may have."""
        ...

    async def start(self) -> None:
        """Make ready: load, connect, check. Called once, on the loop that will use the engine."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """Sample a continuation of `prompt_ids`.

        Args:
            prompt_ids: the whole context so far; for a known `session` it extends what was sent
                and sampled before, so that only new tokens are prefilled.
            params: how to sample. `max_new_tokens` is cut to what `max_context` leaves.
            session: the episode whose cache is kept until `release`.

        Raises:
            EngineError: the policy could not be sampled. Asking again is safe.
        """
        ...

    def release(self, session: str) -> None:
        """The episode ended; what was kept for it can go. Unknown sessions are ignored."""
        ...

    async def aclose(self) -> None:
        """End threads, connections, processes. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tokens of a generation that is still going on; fields as those of `Generation`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """None: there is more to come."""


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """An engine that can tell of tokens as it samples them."""

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """As `generate`, piece by piece. Closing the generator aborts the generation."""
        ...


@runtime_checkable
class InterruptedEngine(Engine, Protocol):
    """An engine whose servers may all be gone for a while."""

    fails_lost_turns: bool
    """A turn that was being sampled when the last server was lost fails at once. Sampling it anew
    would be right for a user who waits, but shortens what is trained on: long turns are lost more
    often than short ones."""

    @property
    def num_outages(self) -> int:
        """How often no server was left."""
        ...

    @property
    def outage_s(self) -> float:
        """For how long there has been no server; 0 while there is one."""
        ...


@runtime_checkable
class GrammarEngine(Engine, Protocol):
    """An engine that keeps to `SamplingParams.grammar`, or raises `GrammarError`."""

    takes_grammars: bool


async def stream_from(
    engine: Engine, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
) -> AsyncGenerator[Piece, None]:
    """The engine's own stream; an engine without one gives everything in one piece."""
    if isinstance(engine, StreamingEngine):
        async with aclosing(engine.stream(prompt_ids, params, session=session)) as pieces:
            async for piece in pieces:
                yield piece
        return
    whole = await engine.generate(prompt_ids, params, session=session)
    yield Piece(
        token_ids=whole.token_ids,
        logprobs=whole.logprobs,
        versions=whole.versions,
        finish_reason=whole.finish_reason,
    )


async def stream_in_chunks(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    session: str | None,
    chunk_tokens: int,
) -> AsyncGenerator[Piece, None]:
    """A stream made of short generations, each going on where the one before has ended.

    For engines that keep the caches of a session, so that going on costs next to nothing, and that
    sample a token by seed and position. Whatever `generate` promises (retries, versions, weights
    that are published meanwhile) holds for each chunk.
    """
    token_ids = list(prompt_ids)
    left = min(params.max_new_tokens, engine.max_context - len(token_ids))
    finish_reason = None
    while finish_reason is None:
        chunk = replace(params, max_new_tokens=min(left, chunk_tokens))
        part = await engine.generate(token_ids, chunk, session=session)
        token_ids += part.token_ids
        left -= len(part.token_ids)
        if part.finish_reason is not FinishReason.LENGTH or left <= 0:
            finish_reason = part.finish_reason
        yield Piece(
            token_ids=part.token_ids,
            logprobs=part.logprobs,
            versions=part.versions,
            finish_reason=finish_reason,
        )


@runtime_checkable
class LocalEngine(Engine, Protocol):
    """An engine in this process: it takes tensors as they are."""

    async def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take new weights (Hugging Face parameter names) and sample with them from now on.

        Requests in flight continue under the new weights; their tokens carry both versions.
        """
        ...


class WeightServer(Protocol):
    """One server whose weights are being replaced. What fails raises EngineError."""

    @property
    def url(self) -> str:
        """Where it answers."""
        ...

    @property
    def num_ranks(self) -> int:
        """Processes that share the model; each takes its part of new weights."""
        ...

    @property
    def needs_update_session(self) -> bool:
        """Weights other than a directory's come between a begin and an end that are said."""
        ...

    async def post(self, route: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Ask a control route; a refusal of the server is an EngineError with its words."""
        ...

    async def load_from_disk(self, directory: Path, version: int) -> None:
        """Take the checkpoint in `directory`, and report `version` from now on."""
        ...


@runtime_checkable
class RemoteEngine(Engine, Protocol):
    """An engine whose weights live in other processes; weight syncs bring new ones there."""

    adapter: str | None
    """The LoRA adapter that the policy is sampled with, by its name on the servers."""

    def updating(
        self, version: int, *, must_abort: bool = False
    ) -> AbstractAsyncContextManager[Sequence[WeightServer]]:
        """Interrupt generation, hand out the living servers, check them, go on.

        `must_abort` when requests in flight cannot continue in place, but must be sent again.

        Inside, the caller brings the weights of `version` to every server it was given. On
        leaving, a server that does not report `version` takes no more requests; requests that were
        interrupted continue where they stopped, under the new weights.

        Raises:
            EngineError: no server took the new weights.
        """
        ...
