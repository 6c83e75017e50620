"""The engine contract: token ids in; token ids, log-probabilities and policy version out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from areal_gym.engines.scoring import ScoringEngine, TopScoringEngine
from areal_gym.types import FinishReason, ImageRef, RoutedExperts

if TYPE_CHECKING:  # the protocols name tensors, but not every engine needs torch
    import torch

__all__ = [
    "BROKEN_WEIGHTS",
    "CountingEngine",
    "Engine",
    "Generation",
    "Grammar",
    "GrammarEngine",
    "ImageEngine",
    "InterruptedEngine",
    "LocalEngine",
    "Piece",
    "ReferenceScores",
    "RejoinedEngine",
    "RemoteEngine",
    "SamplingParams",
    "ScoringEngine",
    "ServerListEngine",
    "SnapshotEngine",
    "StreamingEngine",
    "TakeOverEngine",
    "TopScoringEngine",
    "VerifyingEngine",
    "WeightServer",
    "adapter_name",
    "stream_from",
]


Grammar = tuple[Literal["json_schema", "structural_tag"], str]
"""The kind of grammar and its JSON text: a JSON schema, or xgrammar's structural tag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one turn."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    """0 is greedy; log-probabilities are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """The number of likeliest tokens to sample from; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends after the first of these tokens, which is included."""
    seed: int | None = None
    """Same seed, prompt and weights give the same tokens, whatever else is in the batch."""
    grammar: Grammar | None = None
    """Constrains the output; only a `GrammarEngine` supports it. Log-probabilities are then of the
    constrained distribution, not the policy's."""


@dataclass(kw_only=True, slots=True)
class Generation:
    """The tokens that the policy sampled for one prompt."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """The log-probability of each token under the sampling distribution."""
    versions: Sequence[int]
    """The policy version that sampled each token; weights may be published during a turn."""
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None
    """The experts of a mixture by which each token was sampled, [T, L, K]: those of the position
    before it. None if the engine does not report them, or the model has none."""


@runtime_checkable
class Engine(Protocol):
    """Serves one policy to many concurrent callers on one event loop.

    A class that a run's settings can name (`engine.id`) also has the class method
    `from_settings(policy: Path, settings: EngineConfig) -> Engine`.
    """

    @property
    def policy_version(self) -> int:
        """The version of the weights that sample at the moment."""

    @property
    def max_context(self) -> int:
        """The most tokens of one sequence, including prompt and new tokens."""

    async def start(self) -> None:
        """Load, connect and check. Called once, on the event loop that will use the engine."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """Sample a continuation of `prompt_ids`.

        Args:
            prompt_ids: the whole context so far; for a known `session` it extends what was sent
                and sampled before, so that only new tokens are prefilled.
            params: sampling parameters. `max_new_tokens` is cut to what `max_context` leaves.
            session: the episode whose cache is kept until `release`.

        Raises:
            EngineError: sampling failed. A retry is safe.
        """

    def release(self, session: str) -> None:
        """Free the cache of an ended episode. Unknown sessions are ignored."""

    async def aclose(self) -> None:
        """End threads, connections and processes. Idempotent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Some tokens of a generation in progress; the fields are those of `Generation`."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: FinishReason | None = None
    """None until the last piece."""
    routed_experts: RoutedExperts | None = None


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """An engine that can stream tokens as it samples them."""

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Sample like `generate`, piece by piece. Closing the generator aborts the generation."""


@runtime_checkable
class InterruptedEngine(Engine, Protocol):
    """An engine whose servers may all be unavailable for a while."""

    fails_lost_turns: bool
    """Whether a turn fails at once if the last server is lost while sampling it. Retrying suits a
    user who waits, but biases training data towards short turns: long ones are lost more often."""

    @property
    def num_outages(self) -> int:
        """The number of times that the last serving server was lost."""

    @property
    def outage_s(self) -> float:
        """Seconds since the last serving server was lost; 0 while one serves."""


@runtime_checkable
class RejoinedEngine(Engine, Protocol):
    """An engine whose servers may come back without the published weights."""

    @property
    def needs_weights(self) -> bool:
        """Whether a server needs the weights before it can take requests."""


@runtime_checkable
class TakeOverEngine(Protocol):
    """An engine that may start with other weights than the trainer's."""

    take_over: bool
    """Whether training publishes its own weights to the servers before comparing them."""


@runtime_checkable
class SnapshotEngine(Protocol):
    """An engine that can be copied in its current state, to be measured during training."""

    async def snapshot(self) -> Engine:
        """Return a copy, which has not been started."""


@runtime_checkable
class CountingEngine(Protocol):
    """An engine that counts its work; the counters become `engine/...` metrics."""

    @property
    def stats(self) -> object:
        """A dataclass of counters since the start."""


@runtime_checkable
class GrammarEngine(Engine, Protocol):
    """An engine that follows `SamplingParams.grammar`, or raises `GrammarError`."""

    takes_grammars: bool


@runtime_checkable
class ImageEngine(Engine, Protocol):
    """An engine of a vision-language model. If it streams, its `stream` also takes `images`."""

    takes_images: bool

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageRef] = (),
    ) -> Generation:
        """Sample a continuation of `prompt_ids`, which contains images.

        Args:
            prompt_ids: the whole context, with all placeholder tokens of its images.
            params: sampling parameters. Placeholder ids are never sampled.
            session: as in `Engine.generate`. Equal ids with other images are another context.
            images: the images in order; `start` counts from the beginning of `prompt_ids`. Their
                bytes are in the process's image store.

        Raises:
            EngineError: sampling failed, or the engine read another number of tokens.
        """


async def stream_from(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    session: str | None = None,
    images: Sequence[ImageRef] = (),
) -> AsyncGenerator[Piece, None]:
    """Stream from any engine; an engine that cannot stream gives everything as one piece."""
    image_arguments: dict[str, Any] = {"images": images} if images else {}
    if isinstance(engine, StreamingEngine):
        stream = engine.stream(prompt_ids, params, session=session, **image_arguments)
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                yield piece
        return
    whole = await engine.generate(prompt_ids, params, session=session, **image_arguments)
    yield piece_of(whole, whole.finish_reason)


def piece_of(part: Generation, finish_reason: FinishReason | None) -> Piece:
    """Return a generation as a piece of a longer one."""
    return Piece(
        token_ids=part.token_ids,
        logprobs=part.logprobs,
        versions=part.versions,
        finish_reason=finish_reason,
        routed_experts=part.routed_experts,
    )


@runtime_checkable
class LocalEngine(Engine, Protocol):
    """An engine in this process, which takes tensors directly."""

    async def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load new weights by Hugging Face parameter names, and sample with them from now on.

        Requests in flight continue under the new weights; each token carries its version.
        """


BROKEN_WEIGHTS = "broken"
"""The version that a server reports after a partial transfer, so that no request is sent to it."""


class WeightServer(Protocol):
    """One server whose weights are being replaced. Methods raise EngineError on failure."""

    @property
    def url(self) -> str:
        """The server's base URL."""

    @property
    def protocol(self) -> str:
        """The protocol by which the server takes tensors: "sglang" or "vllm"."""

    @property
    def num_ranks(self) -> int:
        """The number of processes that share the model; each takes its part of new weights."""

    async def post(self, route: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a POST request; raise EngineError that quotes the server if it refuses."""

    async def load_from_disk(self, directory: Path, version: int, *, is_kept: bool = True) -> None:
        """Load the checkpoint in `directory`; the server reports `version` from then on.

        `is_kept` tells that the files stay unchanged, for servers that come back later.
        """

    async def load_adapter(self, directory: Path, version: int) -> None:
        """Load the LoRA adapter in `directory` for requests that name `adapter_name(version)`."""

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; return when no request uses it."""

    async def abort_all(self) -> None:
        """Make the server return all requests with the tokens that they have."""

    async def set_version(self, version: str) -> None:
        """Make the server report `version`."""

    async def begin_update(self) -> None:
        """Begin an update by tensors."""

    async def end_update(self, version: int) -> None:
        """End an update for which all tensors of `version` were sent."""

    async def abandon_update(self) -> None:
        """End an update that failed; the server then reports `BROKEN_WEIGHTS`."""


def adapter_name(version: int) -> str:
    """Return the servers' name for the LoRA adapter that is the policy of this version."""
    return f"policy-v{version}"


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine whose servers can release the memory of GPUs that they share with the trainer."""

    is_asleep: bool
    """Whether the servers have released their memory, and requests wait."""

    def require_sleep(self) -> None:
        """Raise ConfigError if a server cannot release its memory."""

    async def sleep(self, *, keeps_weights: bool = False) -> None:
        """Interrupt generation, and release the memory of the cache and, by default, the weights.

        The next publication brings the weights back; requests continue after `wake_up`.
        """

    async def wake_up(self) -> None:
        """Allocate all memory again, and continue interrupted requests. Idempotent."""


@runtime_checkable
class RemoteEngine(Engine, Protocol):
    """An engine whose weights are in other processes, to which weight syncs bring new ones."""

    adapter: str | None
    """The name of the policy's LoRA adapter on the servers."""

    def updating(
        self, version: int, *, must_abort: bool = False
    ) -> AbstractAsyncContextManager[Sequence[WeightServer]]:
        """Interrupt generation, yield the servers, check them, and resume.

        Inside of the context, the caller brings the weights of `version` to every server. On
        leaving, a server that does not report `version` gets no more requests; interrupted
        requests continue where they stopped, under the new weights. `must_abort` says that
        requests in flight cannot continue in place and must be sent again.

        Raises:
            EngineError: no server took the new weights.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceScores:
    """The trainer's log-probabilities of a short row, to be reproduced by servers."""

    version: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """The log-probabilities of `token_ids[1:]` at temperature 1."""
    max_gap: float
    """The largest mean difference that is tolerated for a server that computes in float32."""
    max_rounded_gap: float
    """The largest mean difference that is tolerated for all other servers."""


@runtime_checkable
class VerifyingEngine(RemoteEngine, Protocol):
    """An engine that compares its servers with the trainer before they sample a new version."""

    reference: ReferenceScores | None
    """The scores that servers are compared with after each publication of their version, and when
    a server comes back; None compares nothing."""


@runtime_checkable
class ServerListEngine(RemoteEngine, Protocol):
    """An engine that lists its servers."""

    @property
    def server_urls(self) -> Sequence[str]:
        """The base URLs of all servers, including lost ones."""
