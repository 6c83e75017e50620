"""Packs rows into a flat batch, in which the prompt of a group is passed once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from areal_gym.models.flat_batch import PackedBatch, Segment
from areal_gym.trainer.batch.bins import Row
from areal_gym.utils.packed_numbers import Ints


def pack(
    rows: Sequence[Row], device: torch.device | str = "cpu", *, has_images: bool = False
) -> PackedBatch:
    """Place rows on the flat axis: first the prompts, then the continuations, siblings together.

    `has_images` says that other rows of the update have images, even if these have none.
    """
    pieces: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    num_tokens = 0

    def lay(tokens: Sequence[int], first_position: int) -> range:
        nonlocal num_tokens
        pieces.append(np.asarray(Ints.of(tokens)))
        positions.append(np.arange(first_position, first_position + len(tokens)))
        num_tokens += len(tokens)
        return range(num_tokens - len(tokens), num_tokens)

    families: dict[bytes, list[int]] = {}
    for i, row in enumerate(rows):
        families.setdefault(row.prompt, []).append(i)
    prompts: dict[bytes, range] = {}
    for shared, (first, *_) in families.items():
        prompts[shared] = lay(rows[first].token_ids[: rows[first].num_shared], 0)
    segments: list[Segment] = [(range(0), prompt) for prompt in prompts.values() if prompt]
    row_index: list[np.ndarray] = [np.arange(0) for _ in rows]
    for shared, members in families.items():
        prompt = prompts[shared]
        for i in members:
            own = lay(rows[i].token_ids[len(prompt) :], len(prompt))
            row_index[i] = np.concatenate([np.arange(*_ends(part)) for part in (prompt, own)])
            if own:
                segments.append((prompt, own))
    token_ids = np.concatenate([np.arange(0, dtype=np.int32), *pieces])
    flat_positions = np.concatenate([np.arange(0), *positions])
    return PackedBatch(
        token_ids_N=torch.tensor(token_ids, dtype=torch.long, device=device),
        positions_N=torch.tensor(flat_positions, dtype=torch.long, device=device),
        segments=tuple(segments),
        row_index=tuple(row_index),
        images=tuple(row.images for row in rows)
        if has_images or any(row.images for row in rows)
        else None,
    )


def _ends(places: range) -> tuple[int, int]:
    return places.start, places.stop
