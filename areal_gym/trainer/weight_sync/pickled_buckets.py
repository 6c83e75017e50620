"""Encodes a bucket's values as SGLang reads them, pickled and in base64, in small steps.

Pickling a tensor copies it several times, and base64 encodes all of it at once, while holding
Python's lock: for that long, a trainer in a thread would stop the event loop. Here the values are
never copied into the pickle. A short placeholder in the pickle is replaced by them piece by piece.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from areal_gym.trainer.weight_sync.flat_buckets import FlatBucket
from areal_gym.trainer.weight_sync.memory_handles import metadata_of

_PIECE_BYTES = 3 * 2**18
"""Bytes that are encoded at a time; divisible by 3."""
_SMALL_BYTES = 2**12
_PROTOCOL = 3
"""Later protocols divide a pickle into frames, whose lengths would change."""
_PLACEHOLDER = b"the values of the bucket, as torch.save writes them"


def encoded(bucket: FlatBucket) -> Iterator[bytes]:
    """Yield a bucket's values in encoded pieces."""
    # Cloned, because pickling a view would include the whole buffer.
    flat = bucket.flat.cpu().clone()
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=_PROTOCOL)
    pickler.dump({"flattened_tensor": flat, "metadata": metadata_of(bucket)})
    before, after = stream.getvalue().split(_in_pickle(_PLACEHOLDER))
    values = pickler.values.parts
    length = sum(len(part) for part in values).to_bytes(8, "little")
    rest = b""
    for part in [before + pickle.BINBYTES8 + length, *values, after]:
        for begin in range(0, len(part), _PIECE_BYTES):
            piece = rest + part[begin : begin + _PIECE_BYTES]
            end = len(piece) - len(piece) % 3
            yield base64.b64encode(piece[:end])
            rest = piece[end:]
    yield base64.b64encode(rest)


class _Pickler(pickle.Pickler):
    """Pickles an object with one tensor; writes `_PLACEHOLDER` for its values, and keeps them."""

    def __init__(self, stream: io.BytesIO, *, protocol: int) -> None:
        super().__init__(stream, protocol=protocol)
        self.values = _Parts()

    def reducer_override(self, value: Any) -> Any:
        """Return how a storage is read, without the copy of its values that torch would return."""
        if not isinstance(value, torch.TypedStorage):
            return NotImplemented
        torch.save(value, self.values, _use_new_zipfile_serialization=False)  # type: ignore[arg-type]
        return torch.storage._load_from_bytes, (_PLACEHOLDER,)


class _Parts:
    """A writable file that keeps the written parts; large ones are not copied: keep them alive."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []

    def write(self, part: bytes | memoryview) -> int:
        self.parts.append(bytes(part) if len(part) < _SMALL_BYTES else part)
        return len(part)

    def flush(self) -> None:
        pass


def _in_pickle(text: bytes) -> bytes:
    return pickle.SHORT_BINBYTES + bytes([len(text)]) + text
