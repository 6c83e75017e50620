"""Flat buckets: many tensors in one buffer of bytes, as SGLang's `flattened_bucket` has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal_gym.errors import TrainError

if TYPE_CHECKING:
    from areal_gym.trainer.base import Weights


@dataclass(slots=True)
class FlatBucket:
    """Tensors one after the other in `flat`, which has bytes."""

    names: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    flat: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    is_last: bool = False

    def facts(self) -> dict[str, object]:
        """Return names, types and shapes as servers read them."""
        return {
            "names": self.names,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
            "shapes": [list(shape) for shape in self.shapes],
            "load_format": "flattened_bucket",
        }

    def add(self, name: str, tensor: Tensor) -> None:
        """Note a tensor; its bytes are put into `flat` by the caller."""
        self.names.append(name)
        self.dtypes.append(tensor.dtype)
        self.shapes.append(tensor.shape)


def flat_buckets(
    weights: Weights, max_bytes: int, allocate: Callable[[int], Tensor] | None = None
) -> Iterator[FlatBucket]:
    """Yield the weights in order, in buckets of at most `max_bytes`; a larger tensor has its own.

    Two buffers take turns: one bucket may be on its way while the next is filled, and must have
    been sent before the next but one is asked for. A tensor begins at a multiple of its type's
    size, as receivers demand, or else in the next bucket.

    Buckets lie on the device of the weights, or else in what `allocate` returns.

    Raises:
        TrainError: there are no weights.
    """
    buffers: dict[int, Tensor] = {}
    bucket, end, num_yielded = FlatBucket(), 0, 0
    for name, weight in weights:
        tensor = weight.detach()
        size = tensor.numel() * tensor.element_size()
        if bucket.names and (end + size > max_bytes or end % tensor.element_size()):
            yield bucket
            bucket, end, num_yielded = FlatBucket(), 0, num_yielded + 1
        bucket.add(name, tensor)
        if size > max_bytes:
            flat = tensor.contiguous().flatten().view(torch.uint8)
            bucket.flat, end = flat if allocate is None else allocate(size).copy_(flat), size
            continue
        if (turn := num_yielded % 2) not in buffers:
            buffers[turn] = (
                torch.empty(max_bytes, dtype=torch.uint8, device=tensor.device)
                if allocate is None
                else allocate(max_bytes)
            )
        buffer = buffers[turn]
        buffer[end : end + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        end += size
        bucket.flat = buffer[:end]
    if not bucket.names:
        raise TrainError("the trainer has no weights to publish")
    bucket.is_last = True
    yield bucket
