"""Fixed data as the trainer takes it: rows of tokens, and which of them are learned from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from areal_gym.trainer.batch.bins import Row, best_fit
from areal_gym.trainer.batch.packing import PackedBatch, pack


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """One dialogue."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """True on the tokens that are learned from; never on the first."""
    num_shared: int = 0
    """Leading tokens that the other rows of its example begin with, too: computed once."""

    @property
    def num_marked(self) -> int:
        """How many tokens are learned from."""
        return sum(self.mask)


Example = tuple[TokenRow, ...]
"""What is compared with each other: one row, or the chosen one and the rejected one."""


def batch_of_step(examples: Sequence[Example], step: int, size: int, seed: int) -> list[Example]:
    """The examples of step 1, 2, ...: each epoch goes through all of them, in an order of its own.

    Depends on nothing but the arguments, so that a resumed run goes on as if nothing had happened.
    """
    found: list[Example] = []
    for place in range((step - 1) * size, step * size):
        epoch, index = divmod(place, len(examples))
        if index == 0 or not found:
            order = list(range(len(examples)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
        found.append(examples[order[index]])
    return found


def example_tokens(example: Example) -> int:
    """Tokens that it adds to a micro-batch: what its rows share counts once."""
    return sum(len(row.token_ids) for row in example) - sum(row.num_shared for row in example[1:])


def placed_micro_batches(
    examples: Sequence[Example], budget: int, device: torch.device | str
) -> Iterator[tuple[PackedBatch, list[int]]]:
    """Packed, at most `budget` tokens each, but never less than one whole example.

    They come in another order than the examples: the places say which ones are in it.
    """
    for places in best_fit([example_tokens(example) for example in examples], budget):
        yield pack_examples([examples[place] for place in places], device), places


def pack_examples(part: Sequence[Example], device: torch.device | str) -> PackedBatch:
    """One micro-batch."""
    rows = [
        Row(token_ids=row.token_ids, num_shared=row.num_shared) for rows in part for row in rows
    ]
    return pack(rows, device)
