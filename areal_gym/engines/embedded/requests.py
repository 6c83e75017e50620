"""The turns that the embedded engine samples, and its counters."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from areal_gym.engines.base import Piece, SamplingParams
from areal_gym.engines.embedded.sampling import uniforms
from areal_gym.types import FinishReason, ImageRef, RoutedExperts


@dataclass(slots=True)
class EngineStats:
    """Counters since the start."""

    num_steps: int = 0
    generated: int = 0
    """Sampled tokens."""
    prefilled: int = 0
    """Prompt tokens that were computed."""
    reused: int = 0
    """Prompt tokens found in the cache, from earlier turns of the session or from siblings."""
    occupancy: int = 0
    """Decoding rows, summed over steps; divided by `num_steps`, the mean batch size."""
    busy_s: float = 0.0
    """Wall seconds in the network and the sampler."""


@dataclass(slots=True, eq=False)
class Request:
    """One turn to sample."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    session: str
    max_new_tokens: int
    images: tuple[ImageRef, ...] = ()
    """The images of the prompt."""
    is_anonymous: bool = False
    """Whether the session has only this turn."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed_experts: list[bytes] = field(default_factory=list)
    """The experts of each sampled token of a mixture, encoded as in `RoutedExperts`."""
    experts_shape: tuple[int, int] = (0, 0)
    """The number of layers, and of experts per token and layer."""
    uniforms: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    is_cancelled: bool = False
    is_streamed: bool = False
    """Whether each token is delivered as soon as it is sampled."""
    num_delivered: int = 0
    cache_keys: tuple[int, ...] = field(init=False)
    """The prompt's ids, with a negative number for placeholders of an image: equal keys mean equal
    keys and values in the cache, while equal ids with other images do not."""

    def __post_init__(self) -> None:
        self.cache_keys = self.prompt_ids
        if self.images:
            keys = list(self.prompt_ids)
            for image in self.images:
                same = [-1 - int(image.sha256[:15], 16)] * image.length
                keys[image.start : image.start + image.length] = same
            self.cache_keys = tuple(keys)
        seed = self.params.seed if self.params.seed is not None else random.getrandbits(48)
        start = len(self.prompt_ids)
        self.uniforms = uniforms(seed, start, start + self.max_new_tokens).tolist()

    def piece(self) -> Piece:
        """Return the tokens sampled since the last piece."""
        start, self.num_delivered = self.num_delivered, len(self.token_ids)
        return Piece(
            token_ids=tuple(self.token_ids[start:]),
            logprobs=tuple(self.logprobs[start:]),
            versions=tuple(self.versions[start:]),
            finish_reason=self.finish_reason,
            routed_experts=RoutedExperts(b"".join(experts), *self.experts_shape)
            if (experts := self.routed_experts[start:])
            else None,
        )
