"""Places the experts that engines recorded on the flat axis of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from areal_gym.models.flat_batch import PackedBatch
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence


def with_recorded_experts(batch: PackedBatch, rows: Sequence[TokenSequence]) -> PackedBatch:
    """Return the batch with the experts by which engines sampled the trained tokens of `rows`.

    A token is sampled at the position before it. So prompts and environments' replies have no
    record, except for their last token. A position that siblings share has none either if they
    were routed differently there.
    """
    known = next((row.routed_experts for row in rows if row.routed_experts is not None), None)
    if known is None:
        return batch
    shape = (known.num_layers, known.top_k)
    experts_NLK = torch.full((len(batch.token_ids_N), *shape), -1, dtype=torch.int16)
    placed: list[tuple[Tensor, Tensor]] = []
    for row, index in zip(rows, batch.row_index, strict=True):
        if row.routed_experts is not None:
            places_T = torch.from_numpy(index[:-1][row.array("loss_mask")[1:]])
            data = bytearray(row.routed_experts.data)
            values_TLK = torch.frombuffer(data, dtype=torch.int16).view(-1, *shape)
            experts_NLK[places_T] = values_TLK
            placed.append((places_T, values_TLK))
    for places_T, values_TLK in placed:
        is_other_T = (experts_NLK[places_T] != values_TLK).flatten(1).any(1)
        experts_NLK[places_T[is_other_T]] = -1
    return replace(batch, routed_experts_NLK=experts_NLK.to(batch.token_ids_N.device))
