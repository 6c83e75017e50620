"""The types in which a checkpoint stores its weights, and their names in safetensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
"""torch's types by their names in safetensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTypes:
    """The types of a checkpoint's tensors; of no checkpoint by default."""

    by_name: Mapping[str, torch.dtype] = field(default_factory=dict)
    main: torch.dtype | None = None
    """The type of most of its numbers."""

    def of(self, name: str, own: torch.dtype) -> torch.dtype:
        """Return the type in which a tensor is stored that is held as `own`.

        A tensor that the checkpoint does not have is stored in the type of most; integers stay.
        """
        stored = self.by_name.get(name, self.main)
        if stored is None or not (stored.is_floating_point and own.is_floating_point):
            return own
        return stored


def read_stored_types(files: Iterable[Path]) -> StoredTypes:
    """Return the types of the tensors in safetensors files; their headers alone are read."""
    by_name: dict[str, torch.dtype] = {}
    counts: Counter[torch.dtype] = Counter()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                header = tensors.get_slice(name)
                dtype = TYPES.get(header.get_dtype())
                if dtype is not None:
                    by_name[name] = dtype
                    counts[dtype] += math.prod(header.get_shape())
    main = max(counts, key=lambda dtype: counts[dtype], default=None)
    return StoredTypes(by_name=by_name, main=main)
