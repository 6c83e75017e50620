"""The values of a bucket as SGLang reads them: pickled and in base64, in small steps.

A pickle of a tensor copies it several times, and base64 encodes all of it, with Python's lock held:
for as long, a trainer in a thread stops the event loop. Here the values are never copied into the
pickle; they take the place of a short text in it, piece by piece.
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
"""The bytes that are encoded at a time; divisible by 3."""
_SMALL_BYTES = 2**12
_PROTOCOL = 3
"""Later protocols divide a pickle into frames, whose lengths would change."""
_PLACE = b"the values of the bucket, as torch.save writes them"


def encoded(bucket: FlatBucket) -> Iterator[bytes]:
    """Yield a bucket's values in pieces."""
    # A view would be pickled with all of the buffer that it is a part of.
    flat = bucket.flat.cpu().clone()
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=_PROTOCOL)
    pickler.dump({"flattened_tensor": flat, "metadata": metadata_of(bucket)})
    before, after = stream.getvalue().split(_in_pickle(_PLACE))
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
    """Pickles what holds one tensor, with `_PLACE` instead of its values, which it keeps."""

    def __init__(self, stream: io.BytesIO, *, protocol: int) -> None:
        super().__init__(stream, protocol=protocol)
        self.values = _Parts()

    def reducer_override(self, value: Any) -> Any:
        """Return how a storage is read; what torch would return holds a copy of its values."""
        if not isinstance(value, torch.TypedStorage):
            return NotImplemented
        torch.save(value, self.values, _use_new_zipfile_serialization=False)  # type: ignore[arg-type]
        return torch.storage._load_from_bytes, (_PLACE,)


class _Parts:
    """A file of the parts that are written; large ones are not copied, and must stay alive."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []

    def write(self, part: bytes | memoryview) -> int:
        self.parts.append(bytes(part) if len(part) < _SMALL_BYTES else part)
        return len(part)

    def flush(self) -> None:
        pass


def _in_pickle(text: bytes) -> bytes:
    return pickle.SHORT_BINBYTES + bytes([len(text)]) + text
