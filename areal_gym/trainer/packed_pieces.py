"""The pieces of a tensor that a rank has, if its part is not one rectangle of the whole.

A matrix that packs two others (gate and up) is divided by tensor parallelism so that each rank has
rows of both: one tensor on the rank, but two pieces of the whole. torch.distributed.checkpoint
(2.13) assumes one piece, and writes it to the wrong place and reads it from there, or fails.
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
    """A run of neighbours along one dimension, on the rank and in the whole tensor."""

    start: int
    whole_start: int
    length: int


def in_pieces(tensor: Tensor) -> Tensor:
    """Return a view of the tensor that a checkpoint writes and reads piece by piece.

    A tensor that has only one piece on this rank is returned unchanged.
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
    view: _Pieces = make(_Pieces, tensor.shape, dtype=tensor.dtype)
    view.pieces = pieces
    return view


class _Pieces(Tensor):
    """A tensor of several pieces, for checkpoints only.

    torch asks its own sharded tensors by the same three methods.
    """

    pieces: dict[tuple[int, ...], Tensor]
    """The pieces, by their offsets in the whole tensor."""

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
    """Return this rank's part of one dimension as runs of neighbouring places in the whole."""
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
