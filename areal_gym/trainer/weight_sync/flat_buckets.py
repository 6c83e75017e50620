"""Flat buckets: many tensors in one buffer of bytes, as in SGLang's `flattened_bucket`."""

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
    """Tensors one after another in `flat`, a tensor of bytes."""

    names: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    flat: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    is_last: bool = False

    def description(self) -> dict[str, object]:
        """Return names, types and shapes in the servers' format."""
        return {
            "names": self.names,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
            "shapes": [list(shape) for shape in self.shapes],
            "load_format": "flattened_bucket",
        }

    def add(self, name: str, tensor: Tensor) -> None:
        """Record a tensor; the caller writes its bytes into `flat`."""
        self.names.append(name)
        self.dtypes.append(tensor.dtype)
        self.shapes.append(tensor.shape)


def flat_buckets(
    weights: Weights, max_bytes: int, allocate: Callable[[int], Tensor] | None = None
) -> Iterator[FlatBucket]:
    """Yield the weights in order, in buckets of at most `max_bytes`; a larger tensor has its own.

    Two buffers alternate: one bucket may be sent while the next is filled, but must have been sent
    before the one after that is requested. A tensor begins at a multiple of its type's size, as
    receivers require; if it cannot, the next bucket begins.

    Buckets are on the device of the weights, or in buffers that `allocate` returns.

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
