"""The contract between the embedded engine's scheduler and networks: steps over cache rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from areal_gym.engines.embedded.cache_attention import Family, Prompt


class NetworkWeights(Protocol):
    """The weights of a network."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a full set of weights, by the checkpoint's names; all or nothing."""
        ...


class CachedNetwork(Protocol):
    """A policy's network with a cache of rows, one for each sequence; used from one thread."""

    scratch: int
    """A position that no sequence has: rows that do not take part write there."""
    can_cut: bool
    """Whether the beginning of what a row caches can be used alone, here or in another row."""
    device: torch.device

    @property
    def weights(self) -> NetworkWeights:
        """The object that takes new weights."""
        ...

    def copy(self) -> Self:
        """Return another network with a copy of the weights and an empty cache."""
        ...

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Give `target` the first cached tokens of `source`; only where rows can be cut."""
        ...

    def swap_rows(self, a: int, b: int, num_tokens: int) -> None:
        """Exchange the first cached tokens of two rows."""
        ...

    def clear(self) -> None:
        """Forget all rows."""
        ...

    def forward(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        rows_N: Tensor,
        *,
        num_decoding: int,
        num_keys: int,
        prompts: Sequence[Prompt],
        families: Sequence[Family],
    ) -> Tensor:
        """Compute one step; see `CachedDecoder.forward`."""
        ...
