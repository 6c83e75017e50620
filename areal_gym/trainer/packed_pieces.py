"""The pieces of a whole tensor that a rank has, where its part is not one rectangle of it.

A matrix that packs two (gate and up) is divided by tensor parallelism so that each rank has rows of
both: one tensor on the rank, two pieces of the whole. torch.distributed.checkpoint (2.13) takes it
for one piece, writes it to the wrong place, or refuses to, and reads it from there.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


class _Run(NamedTuple):
    """Neighbours along one dimension, on the rank and in the whole."""

    start: int
    whole_start: int
    length: int


def in_pieces(tensor: Tensor) -> Tensor:
    """Return a tensor whose pieces a checkpoint writes and reads, in the memory of the given one.

    All tensors but those with several pieces on this rank are returned as they are.
    """
    if not isinstance(tensor, DTensor) or not any(
        isinstance(placement, _StridedShard) for placement in tensor.placements
    ):
        return tensor
    local = tensor.to_local().detach()
    runs = [_runs(tensor, dim) for dim in range(tensor.ndim)]
    pieces: dict[tuple[int, ...], Tensor] = {}
    for parts in itertools.product(*runs):
        piece = local
        for dim, run in enumerate(parts):
            piece = piece.narrow(dim, run.start, run.length)
        pieces[tuple(run.whole_start for run in parts)] = piece
    if len(pieces) < 2:
        return tensor
    make: Any = torch.Tensor._make_wrapper_subclass
    made: _Pieces = make(_Pieces, tensor.shape, dtype=tensor.dtype)
    made.pieces = pieces
    return made


class _Pieces(Tensor):
    """What a checkpoint asks of a tensor that has several pieces; it can do nothing else.

    These three methods are how torch asks its own sharded tensors.
    """

    pieces: dict[tuple[int, ...], Tensor]
    """By where each begins in the whole."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of pieces that a checkpoint reads or writes")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=piece.shape)
            for offset, piece in self.pieces.items()
        ]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.pieces[tuple(index.offset)]


def _runs(tensor: DTensor, dim: int) -> list[_Run]:
    """Return this rank's part of one dimension: the places of the whole, laid out like it."""
    placements = [
        _StridedShard(0, split_factor=placement.split_factor)
        if isinstance(placement, _StridedShard) and placement.dim == dim
        else Shard(0)
        if isinstance(placement, Shard) and placement.dim == dim
        else Replicate()
        for placement in tensor.placements
    ]
    places = distribute_tensor(
        torch.arange(tensor.shape[dim]), tensor.device_mesh, placements, src_data_rank=None
    )
    runs: list[_Run] = []
    for start, place in enumerate(places.to_local().tolist()):
        if runs and place == runs[-1].whole_start + runs[-1].length:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
        else:
            runs.append(_Run(start, place, 1))
    return runs
