"""Tensors that fake servers receive: from files, adapters, request bodies and broadcasts."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_weights(directory: Path) -> dict[str, Any]:
    """Return the tensors of the safetensors files in `directory`."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


class LoadedAdapter:
    """A LoRA adapter, which is read at once, so that its files may be deleted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = read_weights(path)
        config = json.loads((path / "adapter_config.json").read_text())
        self._scale = config["lora_alpha"] / config["r"]

    def merged_into(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return W + alpha / r * B A for each adapted matrix (Hu et al. 2021, section 4.1)."""
        merged = dict(weights)
        for key, down in self._parts.items():
            if key.endswith(".lora_A.weight"):
                name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
                up = self._parts[key.replace(".lora_A.", ".lora_B.")]
                merged[name] = weights[name] + self._scale * (up @ down)
        return merged


class _Unpickler(pickle.Unpickler):
    """Unpickles only tensors and plain data, never code; as strict as SGLang's."""

    _ALLOWED = (
        ("collections", "OrderedDict"),
        ("types", "SimpleNamespace"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch", "Tensor"),
        ("torch.storage", "UntypedStorage"),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
        ("torch.multiprocessing.reductions", "rebuild_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    )

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage_from_bytes
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise ValueError(f"{module}.{name} is not allowed in serialized tensors")


def _storage_from_bytes(raw: bytes) -> Any:
    """Load what `torch.storage._load_from_bytes` does, without unpickling code."""
    import torch

    return torch.load(io.BytesIO(raw), weights_only=True)


def unpacked(serialized: str, load_format: str | None) -> dict[str, Any]:
    """Return the tensors of a request's body, which is not trusted."""
    raw = base64.b64decode(serialized)
    content = _Unpickler(io.BytesIO(raw)).load()
    if load_format == "flattened_bucket":
        flat = content["flattened_tensor"].clone()  # the owner of shared memory fills it again
        return {
            meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
            for meta in content["metadata"]
        }
    return dict(content)


def receive(
    group: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    load_format: str | None,
) -> dict[str, Any]:
    """Return tensors that rank 0 of a process group broadcasts: one by one, or in a flat bucket.

    Raises:
        ValueError: a tensor of a bucket does not begin at a multiple of its type's size.
    """
    import torch
    import torch.distributed as dist

    if load_format not in (None, "flattened_bucket"):
        raise ValueError(f"Unknown load_format={load_format}")
    types = [getattr(torch, dtype) for dtype in dtypes]
    sizes = [math.prod(shape) * t.itemsize for shape, t in zip(shapes, types, strict=True)]
    tensors: dict[str, Any] = {}
    if load_format is None:
        for name, dtype, shape in zip(names, types, shapes, strict=True):
            tensors[name] = torch.empty(shape, dtype=dtype)
            dist.broadcast(tensors[name], src=0, group=group)
        return tensors
    *starts, num_bytes = itertools.accumulate(sizes, initial=0)
    for name, start, dtype in zip(names, starts, types, strict=True):
        if start % dtype.itemsize:
            raise ValueError(f"Unaligned received tensor {name}: byte offset {start}")
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=group)
    for name, part, dtype, shape in zip(names, flat.split(sizes), types, shapes, strict=True):
        tensors[name] = part.view(dtype).reshape(shape)
    return tensors
