"""Encode the changed elements of an array: their positions and differences, compressed.

Positions are sorted and stored as gaps; changes are differences of the elements' bits, taken as
integers. Both are mostly small numbers, whose bytes are compressed plane by plane (zlib). The
result is exact for every type, because no floating-point arithmetic is used.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import numpy as np

from areal_gym.errors import DataError

Bits = np.ndarray[Any, np.dtype[Any]]
"""A flat array of unsigned integers: the bits of another array's elements."""

_LEVEL = 1
"""The fastest level of zlib; higher ones save a tenth of the bytes and take several times longer.
"""


def as_bits(raw: Bits, itemsize: int) -> Bits:
    """View an array of bytes as unsigned integers of 1, 2, 4 or 8 bytes, without a copy."""
    return raw.view(f"<u{itemsize}")


def checksum(bits: Bits) -> str:
    """Return the SHA-256 of an array's bytes."""
    return hashlib.sha256(bits.view(np.uint8).data).hexdigest()


def encode_changes(old: Bits, new: Bits) -> tuple[int, bytes]:
    """Return the number of elements that differ, and the encoded changes for `apply_changes`."""
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=0).astype(_gap_type(len(new)))
    changes = new[positions] - old[positions]  # unsigned integers wrap around
    planes = np.concatenate((_planes(gaps), _planes(changes)))
    return len(positions), zlib.compress(planes.data, _LEVEL)


def apply_changes(array: Bits, num_changed: int, encoded: bytes) -> None:
    """Apply encoded changes to `array` in place.

    Raises:
        DataError: the changes are damaged, or belong to another array.
    """
    gap_type, width = _gap_type(len(array)), array.dtype.itemsize
    num_bytes = num_changed * (gap_type.itemsize + width)
    if not 0 <= num_changed <= len(array):
        raise DataError(f"{num_changed} changes of an array of {len(array)} elements")
    try:
        # One byte more than expected is enough to detect excess data.
        decompressor = zlib.decompressobj()
        raw = decompressor.decompress(encoded, num_bytes + 1)
    except zlib.error as error:
        raise DataError(f"damaged changes: {error}") from None
    if len(raw) != num_bytes or not decompressor.eof:
        raise DataError(f"damaged changes: {len(raw)} bytes where {num_bytes} were announced")
    border = num_changed * gap_type.itemsize
    positions = np.cumsum(_from_planes(raw[:border], gap_type), dtype=np.uint64)
    if num_changed and int(positions.max()) >= len(array):
        raise DataError(f"a change at {int(positions.max())} of an array of {len(array)} elements")
    array[positions] += _from_planes(raw[border:], array.dtype)


def _gap_type(length: int) -> np.dtype[Any]:
    return np.dtype("<u4" if length < 2**32 else "<u8")


def _planes(values: Bits) -> Bits:
    """Return the lowest bytes of all values, then the second ones, and so on."""
    planes = values.view(np.uint8).reshape(len(values), values.dtype.itemsize).T
    return np.ascontiguousarray(planes).reshape(-1)  # `tobytes` would hold the interpreter lock


def _from_planes(raw: bytes, dtype: np.dtype[Any]) -> Bits:
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
