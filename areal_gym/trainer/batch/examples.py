"""Examples of fixed data: rows of tokens, with masks of the tokens to learn from."""

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
    """True on the tokens to learn from; never on the first."""
    is_desirable: bool = True
    """Whether the row is one to imitate; false on what objective "kto" learns to avoid."""

    @property
    def num_marked(self) -> int:
        """The number of tokens to learn from."""
        return sum(self.mask)


Example = tuple[TokenRow, ...]
"""One row; a chosen and a rejected row that are compared; or a labelled row and its prompt with
another row's answer (objective "kto")."""


def batch_of_step(examples: Sequence[Example], step: int, size: int, seed: int) -> list[Example]:
    """Return the examples of step 1, 2, ...: each epoch has all of them, in its own order.

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
    """Return the tokens that it adds to a micro-batch; shared ones count once."""
    return sum(len(row.token_ids) for row in example) - sum(row.num_shared for row in example[1:])


def placed_micro_batches(
    examples: Sequence[Example], budget: int, device: torch.device | str
) -> Iterator[tuple[PackedBatch, list[int]]]:
    """Yield packed micro-batches of at most `budget` tokens, or of one whole example.

    Their order differs from that of the examples: each comes with the indexes of its examples.
    """
    for indexes in best_fit([example_tokens(example) for example in examples], budget):
        yield pack_examples([examples[index] for index in indexes], device), indexes


def pack_examples(
    part: Sequence[Example], device: torch.device | str, *, has_images: bool = False
) -> PackedBatch:
    """Pack examples as one micro-batch; with `has_images`, others of the update have pictures."""
    return pack([row for rows in part for row in rows], device, has_images=has_images)
