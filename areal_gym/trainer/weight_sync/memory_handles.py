"""Memory handles, by which a server's worker on this machine maps a bucket instead of receiving it.

    bucket on a GPU      CUDA IPC: the worker on the same GPU opens it
    bucket on the host   named shared memory, by torch's `file_system` strategy

A handle is what torch.multiprocessing pickles for a tensor, and what SGLang's
`update_weights_from_tensor` expects. File descriptors, the default strategy on the host, reach only
children of the same parent. Named memory belongs to torch's `torch_shm_manager`, which ends with
the last process that used it, possibly the server.
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
"""The index of the device in the arguments of `rebuild_cuda_tensor`."""


def host_buffer(num_bytes: int) -> Tensor:
    """Return a byte buffer that other processes can map, or a plain one if there is no room."""
    try:
        storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    except RuntimeError:  # 64 MB in a container without --shm-size
        return torch.empty(num_bytes, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def prepare_host_buffers() -> None:
    """Start torch's manager of named memory before it is needed.

    The first buffer starts a program and waits for it while holding Python's lock: for a tenth of a
    second, or for seconds on a busy machine.
    """
    host_buffer(1)


def metadata_of(bucket: FlatBucket) -> list[SimpleNamespace]:
    """Return the metadata of a bucket's tensors in SGLang's form.

    SGLang only reads attributes, so plain namespaces suffice, which pass its unpickler; its own
    class is not available in the trainer.
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

    Each worker needs its own handle, because torch counts how often the memory is opened.
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
    """Name a GPU by its UUID, because the receiver may number its GPUs differently."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.device.type == "cpu":
        return rebuild, arguments
    place = _DEVICE_ARGUMENT
    return rebuild, (*arguments[:place], device_uuid(tensor.device), *arguments[place + 1 :])
