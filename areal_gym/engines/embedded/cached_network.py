"""The contract between the embedded engine's scheduler and networks: steps over cache rows.

Axes: `N` tokens of a step, `R` cache rows that decode, `B` prompts that enter the cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, Self

import torch
from torch import Tensor

from areal_gym.errors import ConfigError, EngineError
from areal_gym.message_types import ImageRef
from areal_gym.models.device import pick_device

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The uncached end of one sequence: tokens [start, stop) of cache row `row`."""

    row: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Family:
    """Decoding rows whose sequences begin with the same tokens, or a single row."""

    rows: tuple[int, ...]
    num_shared: int
    """The number of shared first tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The tokens that a network computes at once: one per decoding row, then those of prompts.

    The first `num_decoding` tokens belong to the cache rows 0, 1, 2, ...; the tokens of `prompts`
    follow, one prompt after another.
    """

    token_ids_N: Tensor
    positions_N: Tensor
    """The position of each token in its sequence; idle rows have `scratch`."""
    rows_N: Tensor
    """The cache row of each token."""
    num_decoding: int
    num_keys: int
    """Decoding rows attend only to positions below this."""
    prompts: Sequence[Prompt]
    families: Sequence[Family]
    """The decoding rows, grouped by shared beginnings."""
    images: Mapping[int, tuple[ImageRef, ...]] = field(default_factory=dict)
    """The images of the sequence in a cache row, by row; rows without images are not listed."""
    scores_all: bool = False
    """Whether the logits of all tokens are computed, not only those of last tokens."""

    @property
    def positions_R(self) -> Tensor:
        """The position of each decoding row's token."""
        return self.positions_N[: self.num_decoding]

    @property
    def placed_prompts(self) -> list[tuple[Prompt, slice]]:
        """The prompts, each with the slice of its tokens in the step."""
        stops = [*accumulate(map(len, self.prompts), initial=self.num_decoding)]
        return list(zip(self.prompts, map(slice, stops, stops[1:]), strict=True))

    @property
    def last_tokens(self) -> Tensor:
        """The decoding rows' tokens, then the last token of each prompt, [R + B].

        With `scores_all`, these are all tokens, [N].
        """
        if self.scores_all:
            return torch.arange(len(self.positions_N), device=self.positions_N.device)
        ends = (tokens.stop - 1 for _, tokens in self.placed_prompts)
        return torch.tensor([*range(self.num_decoding), *ends], device=self.positions_N.device)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The size of a cache: `num_rows` sequences of at most `max_context` tokens."""

    num_rows: int
    max_context: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def named(cls, num_rows: int, max_context: int, dtype: str, device: str) -> Self:
        """Make the layout from settings; raise ConfigError for an unknown type or device."""
        if dtype not in _DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}; available: {', '.join(_DTYPES)}")
        return cls(num_rows, max_context, _DTYPES[dtype], pick_device(device, "engine.device"))


class CachedNetwork(Protocol):
    """A policy's network with a cache of rows, one per sequence; used from one thread."""

    scratch: int
    """A position that no sequence has, to which idle rows write."""
    can_cut: bool
    """Whether the beginning of a cached row can be used alone, here or in another row."""
    device: torch.device
    routed_experts: Tensor | None
    """The experts by which the latest step's logits were computed, [R + B, L, K]; None without a
    mixture of experts."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a full set of weights by the checkpoint's names, or nothing."""

    def copy(self) -> Self:
        """Return another network with a copy of the weights and an empty cache."""

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Give `target` the first cached tokens of `source`; only if rows can be cut."""

    def swap_rows(self, a: int, b: int, num_tokens: int) -> None:
        """Exchange the first cached tokens of two rows."""

    def clear(self) -> None:
        """Drop all cached rows."""

    def forward(self, step: Step) -> Tensor:
        """Return float32 logits of the step's `last_tokens`, [R + B, V]."""


def require_same_names(missing: Collection[str], unknown: Collection[str]) -> None:
    """Raise EngineError unless the published weights have exactly the network's names."""
    if missing or unknown:
        raise EngineError(
            f"the published weights are of another model: {len(missing)} tensors are missing "
            f"{sorted(missing)[:3]}, {len(unknown)} are unknown {sorted(unknown)[:3]}"
        )
