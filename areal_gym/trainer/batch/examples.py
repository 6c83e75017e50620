"""Training examples of fixed data: rows of tokens, with masks of the tokens to learn from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from areal_gym.models.flat_batch import PackedBatch
from areal_gym.trainer.batch.bins import Row, best_fit
from areal_gym.trainer.batch.packing import pack


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow(Row):
    """The tokens of one dialogue; all rows of its example share the first `num_shared`."""

    token_ids: Sequence[int]
    mask: Sequence[bool]
    """True on the tokens to learn from; the first is never one of them."""
    is_desirable: bool = True
    """Whether the row is a good answer; objective "kto" learns to avoid the others."""

    @property
    def num_marked(self) -> int:
        """The number of tokens to learn from."""
        return sum(self.mask)


Example = tuple[TokenRow, ...]
"""One row; or a chosen and a rejected row; or, for objective "kto", a labelled row and its prompt
with another row's answer."""


def batch_of_step(examples: Sequence[Example], step: int, size: int, seed: int) -> list[Example]:
    """Return the examples of step 1, 2, ...; each epoch has all of them in an order of its own.

    The result depends on the arguments only, so that a resumed run continues with the same batches.
    """
    batch: list[Example] = []
    for position in range((step - 1) * size, step * size):
        epoch, index = divmod(position, len(examples))
        if index == 0 or not batch:
            order = list(range(len(examples)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
        batch.append(examples[order[index]])
    return batch


def example_tokens(example: Example) -> int:
    """Return the tokens that an example adds to a micro-batch; shared ones count once."""
    return sum(len(row.token_ids) for row in example) - sum(row.num_shared for row in example[1:])


def placed_micro_batches(
    examples: Sequence[Example], budget: int, device: torch.device | str
) -> Iterator[tuple[PackedBatch, list[int]]]:
    """Yield packed micro-batches of at most `budget` tokens, or of one larger example.

    Each comes with the indexes of its examples, because their order changes.
    """
    for indexes in best_fit([example_tokens(example) for example in examples], budget):
        yield pack_examples([examples[index] for index in indexes], device), indexes


def pack_examples(
    part: Sequence[Example], device: torch.device | str, *, has_images: bool = False
) -> PackedBatch:
    """Pack examples as one micro-batch; `has_images`: other examples of the update have images."""
    return pack([row for rows in part for row in rows], device, has_images=has_images)
