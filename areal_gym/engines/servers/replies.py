"""Requests for turns and the replies to them, in a form common to all kinds of servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_gym.engines.base import Generation, SamplingParams
from areal_gym.errors import EngineError
from areal_gym.message_types import ImageRef, collapsed
from areal_gym.types import FinishReason, RoutedExperts
from areal_gym.utils.packed_numbers import Floats, Ints

INITIAL_WEIGHTS = "default"
"""The servers' name for the weights that they started with, our version 0."""
_MAX_DIGITS = 9
"""The most digits of a version that we publish. Longer names, such as times, exceed 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """A request for the next tokens of a turn."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_new_tokens: int
    adapter: str | None
    """The name of the LoRA adapter to sample with."""
    version: int
    """The policy version of the tokens, unless the server reports one."""
    num_layers: int | None
    """The policy's number of layers, for the experts of tokens."""
    images: tuple[ImageRef, ...] = ()
    """The images of the prompt."""
    banned_ids: tuple[int, ...] = ()
    """Ids that must not be sampled: placeholders of images."""

    @property
    def wire_ids(self) -> list[int]:
        """The prompt with a single placeholder per image."""
        return collapsed(self.prompt_ids, self.images) if self.images else self.prompt_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """The version, model and limits that a server reports."""

    version: str
    """The version of the server's program."""
    model_path: str
    weight_version: str
    max_context: int
    """The most tokens of prompt and new tokens together."""
    vocab_size: int | None
    """The model's vocabulary size; None if the server does not report it."""
    can_set_aside: bool
    """Whether requests can wait in the server while weights change, and continue afterwards."""
    device: str
    """The kind of device that it samples on; "unknown" if the server does not report it."""
    frees_memory: bool
    """Whether the memory of its GPUs can be released."""
    dtype: str = "unknown"
    """The type that it computes in, by torch's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """A request for the `top_k` likeliest tokens in the places of `token_ids[start:]`."""

    token_ids: Sequence[int]
    top_k: int
    start: int
    adapter: str | None

    @property
    def num_places(self) -> int:
        """The number of places."""
        return len(self.token_ids) - self.start


@dataclass(slots=True)
class Reply:
    """The tokens of one request, or of all requests of one turn so far."""

    token_ids: Ints = field(default_factory=Ints)
    logprobs: Floats = field(default_factory=Floats)
    versions: Ints = field(default_factory=Ints)
    finish: str = ""
    """"stop", "length" or "abort"."""
    routed_experts: list[RoutedExperts | None] = field(default_factory=list)
    """The experts of the tokens of each request that sampled any."""

    def add(self, reply: Reply) -> None:
        """Append the tokens of the turn's next request."""
        self.token_ids = Ints.joined((self.token_ids, reply.token_ids))
        self.logprobs = Floats.joined((self.logprobs, reply.logprobs))
        self.versions = Ints.joined((self.versions, reply.versions))
        self.routed_experts += reply.routed_experts

    def generation(self, finish_reason: FinishReason) -> Generation:
        """Return the whole turn."""
        return Generation(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=finish_reason,
            routed_experts=RoutedExperts.joined(self.routed_experts),
        )


def shared_sampling_params(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters whose names all servers share."""
    body: dict[str, Any] = {"temperature": params.temperature}
    if params.top_p != 1.0:
        body["top_p"] = params.top_p
    if params.top_k > 0:
        body["top_k"] = params.top_k
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    return body


def make_reply(
    route: str,
    token_ids: Ints,
    logprobs: Floats,
    finish: str,
    spans: Sequence[dict[str, Any]] | None,
    version: int,
) -> Reply:
    """Return the reply of `route`; tokens have `version` if the server reports no spans.

    Raises:
        EngineError: the answer is not one that servers give.
    """
    if finish not in ("stop", "length", "abort"):
        raise EngineError(f"{route} returned the unknown finish reason {finish!r}")
    if finish != "abort" and not token_ids:
        raise EngineError(f"{route} sampled no tokens, but reports {finish!r}")
    num_tokens = len(token_ids)
    versions = Ints.repeated(version, num_tokens) if spans is None else _versions(spans, num_tokens)
    return Reply(token_ids, logprobs, versions, finish)


def version_of(name: str) -> int:
    """Return the version for a server's name of its weights; -1 if another run published them."""
    if name == INITIAL_WEIGHTS:
        return 0
    return int(name) if name.isdecimal() and len(name) <= _MAX_DIGITS else -1


def _versions(spans: Sequence[dict[str, Any]], num_tokens: int) -> Ints:
    parts, start = [], 0
    for span in spans:
        end = min(span["end"], num_tokens)
        parts.append(Ints.repeated(version_of(span["version"]), end - start))
        start = max(start, end)
    if start != num_tokens:
        raise EngineError(f"weight_versions {spans} do not cover {num_tokens} tokens")
    return Ints.joined(parts)
