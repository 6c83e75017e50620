"""Weights in Hugging Face's layout, written one tensor at a time.

    plan_export:         names and shapes -> files, and the place of every tensor in its file
    write_planned_file:  read a tensor of the network, merge adapters, convert, write in place

The place of each tensor is known before any is there, so that a writer holds one at a time, and
several processes write different files. A single file has the very bytes that safetensors' own
`save_file` writes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from areal_gym.errors import TrainError
from areal_gym.models.lora_weights import NetworkTensor
from areal_gym.models.policy_model import PolicyModel
from areal_gym.models.stored_types import TYPES

_NAMES = {dtype: name for name, dtype in TYPES.items()}
INDEX = "model.safetensors.index.json"
MAX_EXPORT_BYTES = 5 * 10**9
"""The size of a file of weights; a larger tensor has its own."""
_LEAST_BYTES = 2**30
"""Files are not made smaller than this for the sake of more writers."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor of the checkpoint, and the tensor of the network that it is made of."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    part: NetworkTensor

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of weights."""

    name: str
    header: bytes
    places: Mapping[str, tuple[int, torch.dtype]]
    """Where each tensor begins, and its type."""
    parts: Sequence[NetworkTensor]
    """The tensors of the network that it is made of."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The files of one checkpoint's weights."""

    files: Sequence[PlannedFile]
    num_bytes: int
    is_rounded: bool
    """Whether a tensor is stored in a type that cannot hold its values."""

    def index(self) -> bytes | None:
        """Return the content of the index that several files need."""
        if len(self.files) == 1:
            return None
        places = {name: file.name for file in self.files for name in file.places}
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
        return (json.dumps(index, indent=2) + "\n").encode()


def plan_export(
    model: PolicyModel,
    parts: Sequence[NetworkTensor],
    held: Mapping[str, Tensor],
    *,
    num_writers: int = 1,
    max_bytes: int = MAX_EXPORT_BYTES,
) -> ExportPlan:
    """Plan the files for the tensors `parts` of a model; every rank plans the same.

    Only shapes and types of `held`, the model's state, are read. Tensors are stored in
    `model.stored_types`.
    """
    planned: dict[str, _Planned] = {}
    is_rounded = False
    for part in parts:
        own = held[part.sources[0]]
        empty = torch.empty(own.shape, dtype=own.dtype, device="meta")
        for name, tensor in model.checkpoint_tensors(part.name, empty).items():
            dtype = model.stored_types.of(name, tensor.dtype)
            is_rounded |= torch.promote_types(dtype, tensor.dtype) != dtype
            planned[name] = _Planned(name, dtype, tensor.shape, part)
    num_bytes = sum(each.num_bytes for each in planned.values())
    most = min(max_bytes, max(_LEAST_BYTES, math.ceil(num_bytes / num_writers)))
    groups: list[list[_Planned]] = [[]]
    num_held = 0
    for each in planned.values():
        if groups[-1] and num_held + each.num_bytes > most:
            groups.append([])
            num_held = 0
        groups[-1].append(each)
        num_held += each.num_bytes
    names = ["model.safetensors"]
    if len(groups) > 1:
        count = len(groups)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    files = [_planned_file(name, group) for name, group in zip(names, groups, strict=True)]
    return ExportPlan(files, num_bytes, is_rounded)


def write_planned_file(
    model: PolicyModel,
    file: PlannedFile,
    directory: Path,
    read: Callable[[str], Tensor],
) -> None:
    """Write one file of a plan, and wait until it is on disk.

    `read` returns a whole tensor of the model's state by its name. The model may be training.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    missing = set(file.places)
    with (directory / file.name).open("wb") as handle:
        handle.write(file.header)
        for part in file.parts:
            merged = part.merged([read(source) for source in part.sources])
            for name, tensor in model.checkpoint_tensors(part.name, merged).items():
                if name in file.places:
                    place, dtype = file.places[name]
                    handle.seek(place)
                    handle.write(_raw(tensor.detach().to(dtype)))
                    missing.discard(name)
        handle.flush()
        os.fsync(handle.fileno())
    if missing:
        raise TrainError(f"{file.name} lacks {len(missing)} tensors, such as {min(missing)}")


def _planned_file(name: str, tensors: Sequence[_Planned]) -> PlannedFile:
    """Lay out a file as safetensors does: larger types first, then by name."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for each in sorted(tensors, key=lambda t: (-t.dtype.itemsize, _NAMES[t.dtype], t.name)):
        begins[each.name], end = end, end + each.num_bytes
        header[each.name] = {
            "dtype": _NAMES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [begins[each.name], end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return PlannedFile(
        name=name,
        header=len(text).to_bytes(8, "little") + text,
        places={each.name: (first + begins[each.name], each.dtype) for each in tensors},
        parts=list({id(each.part): each.part for each in tensors}.values()),
    )


def _raw(tensor: Tensor) -> memoryview:
    raw: memoryview = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    return raw
