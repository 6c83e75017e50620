"""Assigns rows to micro-batches: few and full ones, that repeat few prompts.

Best-fit decreasing: rows are placed largest first, each into the fullest micro-batch with room
(Johnson 1973: at most 11/9 of the fewest). Rows with the same prompt form one piece, so that
the prompt is passed once. A piece is split only if it is too large, or if that saves a whole
micro-batch and repeats few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from areal_gym.message_types import ImageRef
from areal_gym.utils.packed_numbers import Ints

_REPEATED = 0.05
"""The most prompt tokens that may be repeated to save a micro-batch, as a share of its budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The tokens of one sequence; siblings may share its first `num_shared` tokens."""

    token_ids: Sequence[int]
    num_shared: int = 0
    images: tuple[ImageRef, ...] = ()
    """The row's images; siblings share those within the shared tokens."""

    @property
    def prompt(self) -> bytes:
        """The shared tokens and images in a form that is fast to compare.

        Prompts with equal ids but different images are different.
        """
        ids = bytes(Ints.of(self.token_ids[: self.num_shared]).raw)
        shared = (image for image in self.images if image.start < self.num_shared)
        return ids + b"".join(f"|{image.start}:{image.sha256}".encode() for image in shared)


@dataclass(slots=True)
class _Piece:
    """Rows of one family, which share a prompt of `num_shared` tokens; `family` is its number."""

    family: int
    num_shared: int
    num_own: int
    """The tokens of all rows after the shared ones."""
    members: list[int]

    @property
    def size(self) -> int:
        return self.num_shared + self.num_own


@dataclass(slots=True)
class _Bin:
    room: int
    families: set[int] = field(default_factory=set)
    members: list[int] = field(default_factory=list)

    def cost(self, piece: _Piece) -> int:
        """Return the number of tokens that the piece would add."""
        return piece.num_own if piece.family in self.families else piece.size

    def add(self, piece: _Piece) -> None:
        self.room -= self.cost(piece)
        self.families.add(piece.family)
        self.members += piece.members


def best_fit(costs: Sequence[int], budget: int) -> list[list[int]]:
    """Return the indexes in each bin; a bin's costs are `budget` at most, or it has one member."""
    pieces = [_Piece(i, 0, cost, [i]) for i, cost in enumerate(costs)]
    return [full.members for full in _filled(pieces, budget)]


def split_by_tokens(rows: Sequence[Row], budget: int) -> list[list[int]]:
    """Return the row indexes of each micro-batch: `budget` flat tokens at most, or one row."""
    single = _single_rows(rows)
    bins = _filled(_pieces(single, budget), budget)
    while fewer := _fewer(bins, single, budget):
        bins = fewer
    return [sorted(full.members) for full in bins]


def split_by_patches(rows: Sequence[Row], members: Sequence[int], budget: int) -> list[list[int]]:
    """Split a micro-batch's members into parts whose distinct images have `budget` patches at most.

    An image without a grid counts its placeholder tokens. A part of one row may exceed the budget.
    """
    parts: list[list[int]] = [[]]
    costs: dict[str, int] = {}
    for index in members:
        own = {image.sha256: _num_patches(image) for image in rows[index].images}
        if parts[-1] and sum((costs | own).values()) > budget:
            parts.append([])
            costs = {}
        parts[-1].append(index)
        costs |= own
    return parts


def _num_patches(image: ImageRef) -> int:
    return image.length if image.grid is None else math.prod(image.grid)


def _single_rows(rows: Sequence[Row]) -> list[_Piece]:
    families: dict[bytes, int] = {}
    pieces = []
    for index, row in enumerate(rows):
        prompt, num_tokens = row.prompt, len(row.token_ids)
        family = families.setdefault(prompt, len(families)) if prompt else -1 - index
        num_shared = min(row.num_shared, num_tokens)
        pieces.append(_Piece(family, num_shared, num_tokens - num_shared, [index]))
    return pieces


def _pieces(single: Iterable[_Piece], budget: int) -> list[_Piece]:
    """Return each family as one piece, or as single rows if it exceeds the budget."""
    families: dict[int, list[_Piece]] = {}
    for row in single:
        families.setdefault(row.family, []).append(row)
    pieces = []
    for family, rows in families.items():
        num_own = sum(row.num_own for row in rows)
        members = [i for row in rows for i in row.members]
        whole = _Piece(family, rows[0].num_shared, num_own, members)
        pieces += [whole] if whole.size <= budget else rows
    return pieces


def _filled(pieces: Iterable[_Piece], budget: int) -> list[_Bin]:
    bins: list[_Bin] = []
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        fitting = [bin_ for bin_ in bins if bin_.cost(piece) <= bin_.room]
        if not fitting:
            bins.append(_Bin(budget))
        best = min(fitting, key=lambda bin_: (bin_.cost(piece), bin_.room), default=bins[-1])
        best.add(piece)
    return bins


def _fewer(bins: list[_Bin], single: Sequence[_Piece], budget: int) -> list[_Bin] | None:
    """Distribute one bin's rows over the others; return None if that is possible for no bin."""
    for spare in sorted(bins, key=lambda bin_: -bin_.room):
        if sum(other.room for other in bins) - spare.room < budget - spare.room:
            return None
        if (remaining := _without(spare, bins, single, budget)) is not None:
            return remaining
    return None


def _without(
    spare: _Bin, bins: Iterable[_Bin], single: Sequence[_Piece], budget: int
) -> list[_Bin] | None:
    others = [_Bin(b.room, {*b.families}, [*b.members]) for b in bins if b is not spare]
    num_added = 0
    for row in sorted((single[i] for i in spare.members), key=lambda row: -row.size):
        fitting = [bin_ for bin_ in others if bin_.cost(row) <= bin_.room]
        if not fitting:
            return None
        # A bin that has its prompt is best, then one with room for its siblings.
        best = min(fitting, key=lambda bin_: (bin_.cost(row), -bin_.room))
        num_added += best.cost(row)
        best.add(row)
    num_repeated = num_added - (budget - spare.room)
    return others if num_repeated <= _REPEATED * budget else None
