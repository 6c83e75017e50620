"""Decoding siblings: what begins alike is read once for all of them.

A step of decoding is bound by reading keys and values. Rows of a family have the same first tokens,
so that their queries can be multiplied with one row's keys of these: a product of matrices where
each row's own keys take one of a vector and a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Families", "Siblings", "index_of"]

_MIN_SHARED = 16
"""Fewer tokens are not worth the detour."""
_MAX_PADDING = 3
"""Queries computed per query needed; the product of matrices is several times cheaper for each."""


@dataclass(frozen=True, slots=True)
class Families:
    """Which rows of the cache begin alike."""

    num_tokens: int
    """Of each family's rows these are the same."""
    rows: tuple[tuple[int, ...], ...]
    """Of each family; every row that decodes is in one, alone if need be."""

    @property
    def is_worthwhile(self) -> bool:
        """Whether reading once is cheaper than reading each."""
        num_rows, largest = sum(map(len, self.rows)), max(map(len, self.rows), default=0)
        return (
            self.num_tokens >= _MIN_SHARED
            and len(self.rows) < num_rows
            and len(self.rows) * largest <= _MAX_PADDING * num_rows
        )


def index_of(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Of these rows of the cache: where they follow one another, nothing needs to be copied."""
    run = range(rows[0], rows[0] + len(rows))
    return slice(run.start, run.stop) if list(rows) == list(run) else torch.tensor(rows).to(device)


class Siblings:
    """Products of queries and probabilities with the keys and values that a family has in common.

    Axes: `R` rows, `K` key heads, `G` query heads of each, `F` families of `M` rows (padded), `S`
    tokens in common, `D` head dimension.

    Args:
        families: who begins alike.
        num_rows: R.
        num_heads: K, G.
        device: of the cache.
    """

    def __init__(
        self, families: Families, num_rows: int, num_heads: tuple[int, int], device: torch.device
    ) -> None:
        self.num_tokens = families.num_tokens
        num_keys, num_groups = num_heads
        size = max(map(len, families.rows))
        grid = torch.tensor([[*rows, *rows[:1] * (size - len(rows))] for rows in families.rows])
        self._leaders = index_of([rows[0] for rows in families.rows], device)
        heads_KG = torch.arange(num_keys * num_groups).view(num_keys, 1, num_groups)
        there_FKMG = (grid * len(heads_KG.flatten()))[:, None, :, None] + heads_KG
        back = torch.zeros(num_rows * num_keys * num_groups, dtype=torch.long)
        back[there_FKMG.flatten()] = torch.arange(there_FKMG.numel())
        self._shape = len(grid) * num_keys, size * num_groups
        self._there, self._back = there_FKMG.flatten().to(device), back.to(device)

    def scores(self, q_QD: Tensor, keys_SKTD: Tensor) -> Tensor:
        """[R K G, D] and all rows' keys to [R K G, S]; those of idle rows mean nothing."""
        queries = q_QD.index_select(0, self._there).view(*self._shape, -1)
        scores = torch.bmm(queries, self._common(keys_SKTD).transpose(1, 2))
        return scores.flatten(0, 1).index_select(0, self._back)

    def mix(self, probs_QS: Tensor, values_SKTD: Tensor) -> Tensor:
        """[R K G, S] and all rows' values to [R K G, D]."""
        probs = probs_QS.index_select(0, self._there).view(*self._shape, -1)
        mixed = torch.bmm(probs, self._common(values_SKTD))
        return mixed.flatten(0, 1).index_select(0, self._back)

    def _common(self, cached_SKTD: Tensor) -> Tensor:
        return cached_SKTD[self._leaders, :, : self.num_tokens].flatten(0, 1)
