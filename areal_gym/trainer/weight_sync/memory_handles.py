"""Handles of memory: a server's worker on this machine maps a bucket instead of receiving it.

    bucket on a GPU      CUDA IPC: the worker on the same GPU opens it
    bucket on the host   shared memory with a name, by torch's `file_system` strategy

A handle is what torch.multiprocessing pickles for a tensor, and what SGLang's
`update_weights_from_tensor` is made for. File descriptors, the default strategy for the host, reach
children of one parent only. Named memory belongs to torch's `torch_shm_manager`, which ends with
the last process that has used it: that may be the server.
"""

from __future__ import annotations

import base64
import io
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from areal_gym.models.device import device_uuid
from areal_gym.trainer.weight_sync.flat_buckets import FlatBucket

_DEVICE_ARGUMENT = 6
"""The place of the device in what `rebuild_cuda_tensor` is called with."""


def host_buffer(num_bytes: int) -> Tensor:
    """Return a buffer of bytes that other processes can map; a plain one where there is no room."""
    try:
        storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    except RuntimeError:  # 64 MB in a container without --shm-size
        return torch.empty(num_bytes, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def prepare_host_buffers() -> None:
    """Start torch's manager of named memory.

    The first buffer starts a program and waits for it with Python's lock held: for a tenth of a
    second, and for seconds on a busy machine.
    """
    host_buffer(1)


def metadata_of(bucket: FlatBucket) -> list[SimpleNamespace]:
    """Return the metadata of a bucket's tensors as SGLang reads it.

    SGLang reads it by attribute only, so it need not be of its own class, which the trainer does
    not have; plain namespaces pass its unpickler.
    """
    metadata = []
    start = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        end = start + shape.numel() * dtype.itemsize
        facts = {"name": name, "shape": shape, "dtype": dtype, "numel": end - start}
        metadata.append(SimpleNamespace(**facts, start_idx=start, end_idx=end))
        start = end
    return metadata


def handle_of(bucket: FlatBucket, flat: Tensor) -> bytes:
    """Return a handle for one worker, in base64; `flat` has the bucket's bytes.

    Each worker needs a handle of its own: torch counts who has opened the memory.
    """
    stream = io.BytesIO()
    pickler: Any = ForkingPickler(stream)
    pickler.dispatch_table = pickler.dispatch_table | {
        torch.UntypedStorage: _by_name,
        Tensor: _by_uuid,
    }
    pickler.dump({"flattened_tensor": flat, "metadata": metadata_of(bucket)})
    return base64.b64encode(stream.getbuffer())


def _by_name(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    manager, name, size = storage._share_filename_cpu_()
    storage._shared_incref()  # until the receiver has opened it, which counts down
    return reductions.rebuild_storage_filename, (type(storage), manager, name, size)


def _by_uuid(tensor: Tensor) -> tuple[Any, ...]:
    """Name a GPU by its id: the receiver may number those that it sees in another way."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.device.type == "cpu":
        return rebuild, arguments
    place = _DEVICE_ARGUMENT
    return rebuild, (*arguments[:place], device_uuid(tensor.device), *arguments[place + 1 :])
