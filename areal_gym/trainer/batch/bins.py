"""Assigns rows to micro-batches: full ones, with a group's prompt in as few as possible.

Best-fit decreasing: the largest first, each into the fullest micro-batch that still has room
(Johnson 1973: never more than 11/9 of the fewest). Rows that begin with the same prompt are one
piece, so that it is forwarded once; a piece is cut only if it is too large, or if that saves a
whole micro-batch and repeats few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from areal_gym.message_types import ImageRef
from areal_gym.utils.packed_numbers import Ints

_REPEATED = 0.05
"""Limit of repeated prompt tokens to save a micro-batch, as a share of its budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Tokens of one sequence; siblings may share its first `num_shared` tokens."""

    token_ids: Sequence[int]
    num_shared: int = 0
    images: tuple[ImageRef, ...] = ()
    """The row's pictures; siblings share those among the shared tokens."""

    @property
    def prompt(self) -> bytes:
        """The shared tokens and pictures, in a form that is quickly compared.

        Two prompts of equal ids with other pictures are two.
        """
        ids = bytes(Ints.of(self.token_ids[: self.num_shared]).raw)
        shared = (image for image in self.images if image.start < self.num_shared)
        return ids + b"".join(f"|{image.start}:{image.sha256}".encode() for image in shared)


@dataclass(slots=True)
class _Piece:
    """Rows of one family, which share `num_shared` tokens; `family` names them."""

    family: int
    num_shared: int
    num_own: int
    """Tokens of all rows after the shared ones."""
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
    """Return the indexes of each bin's members: at most `budget` together, or one larger member."""
    pieces = [_Piece(i, 0, cost, [i]) for i, cost in enumerate(costs)]
    return [each.members for each in _filled(pieces, budget)]


def split_by_tokens(rows: Sequence[Row], budget: int) -> list[list[int]]:
    """Return the row indexes of each micro-batch: at most `budget` flat tokens, or one row."""
    single = _single_rows(rows)
    bins = _filled(_pieces(single, budget), budget)
    while fewer := _fewer(bins, single, budget):
        bins = fewer
    return [sorted(each.members) for each in bins]


def split_by_patches(rows: Sequence[Row], members: Sequence[int], budget: int) -> list[list[int]]:
    """Return the members of a micro-batch in parts whose distinct pictures fit into `budget`.

    A picture counts its patches, or its placeholders where it has no grid. One row may have more.
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
    """Return each family as one piece, or row by row if it is larger than the budget."""
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
        fitting = [each for each in bins if each.cost(piece) <= each.room]
        if not fitting:
            bins.append(_Bin(budget))
        best = min(fitting, key=lambda each: (each.cost(piece), each.room), default=bins[-1])
        best.add(piece)
    return bins


def _fewer(bins: list[_Bin], single: Sequence[_Piece], budget: int) -> list[_Bin] | None:
    """Distribute the rows of one bin over the others; return None if no bin's rows fit there."""
    for each in sorted(bins, key=lambda each: -each.room):
        if sum(other.room for other in bins) - each.room < budget - each.room:
            return None
        if (remaining := _without(each, bins, single, budget)) is not None:
            return remaining
    return None


def _without(
    spare: _Bin, bins: Iterable[_Bin], single: Sequence[_Piece], budget: int
) -> list[_Bin] | None:
    others = [_Bin(b.room, {*b.families}, [*b.members]) for b in bins if b is not spare]
    num_added = 0
    for row in sorted((single[i] for i in spare.members), key=lambda row: -row.size):
        fitting = [each for each in others if each.cost(row) <= each.room]
        if not fitting:
            return None
        # A bin with its prompt is best; otherwise one with room for its siblings.
        best = min(fitting, key=lambda each: (each.cost(row), -each.room))
        num_added += best.cost(row)
        best.add(row)
    num_repeated = num_added - (budget - spare.room)
    return others if num_repeated <= _REPEATED * budget else None
