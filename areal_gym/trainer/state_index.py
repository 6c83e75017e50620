"""Reads the index of saved states, `.metadata`, without running code that it may contain.

`torch.distributed.checkpoint` reads the index with `pickle.load`, which runs any code in the file,
and a run directory may come from another person. Here an unpickler makes inert records for the few
names of torch's format; a second pass checks every field and builds torch's own objects. Any other
name, shape or type is refused. Tensors themselves are read by torch with `weights_only`.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from areal_gym.errors import ConfigError
from areal_gym.utils.files import read_bytes

_T = TypeVar("_T")
INDEX_NAME = ".metadata"
_MOST_BYTES = 2**28
"""The limit on the size of an index; one of a million pieces is smaller."""
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    # The path where the checkpoint was written; it is skipped.
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath",),
}
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)


class _Record:
    """Stands for one of torch's objects: keeps what the pickle gives it, and does nothing."""

    arguments: tuple[Any, ...]
    fields: Any

    def __new__(cls, *arguments: Any) -> _Record:  # the pickle may call only this
        record = super().__new__(cls)
        record.arguments, record.fields = arguments, {}
        return record

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.fields = state


# This is the unpickler in Python: the one in C allocates memory for any index that a file names.
class _Unpickler(pickle._Unpickler):
    """Makes records for the names that an index needs, and refuses all others."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self.classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if name not in _RECORDS.get(module, ()):
            raise ConfigError(f"it names {module}.{name}, which no index of states needs")
        return self.classes.setdefault(name, type(name, (_Record,), {}))

    def get_extension(self, code: int) -> None:
        raise ConfigError("it uses an extension code, which no index of states needs")

    def persistent_load(self, pid: Any) -> Any:
        raise ConfigError("it uses a persistent id, which no index of states needs")


class StateReader(FileSystemReader):
    """torch's checkpoint reader, with an index that is read as data or given."""

    def __init__(self, directory: Path, index: Metadata | None = None) -> None:
        super().__init__(directory)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index, checked (`read_index`)."""
        metadata = self._index or read_index(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_index(directory: Path) -> Metadata:
    """Return names, shapes and places of the tensors that were saved in a directory.

    Raises:
        ConfigError: the index is missing or damaged, or contains what no index needs.
    """
    file = directory / INDEX_NAME
    try:
        return _checked(_Unpickler(read_bytes(file, most=_MOST_BYTES)).load())
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(
            f"cannot read {file}: {reason}",
            hints=["did another program write it? an index names only tensors and files"],
        ) from None


def _checked(record: Any) -> Metadata:
    """Build torch's objects from records after checking every field."""
    fields = _fields(record, "Metadata")
    tensors = {
        _typed(name, str): _tensor(record)
        for name, record in _typed(fields["state_dict_metadata"], dict).items()
    }
    pieces = {
        _index(key): _piece(record) for key, record in _typed(fields["storage_data"], dict).items()
    }
    room: Counter[str] = Counter()
    for index, piece in pieces.items():
        room[index.fqn] += piece.length
    for name, tensor in tensors.items():
        # Memory is allocated by the index's sizes before any tensor has been read.
        if math.prod(tensor.size) * tensor.properties.dtype.itemsize > room[name]:
            raise ConfigError(f"the tensor {name!r} is larger than what was saved of it")
    return Metadata(state_dict_metadata=dict(tensors), storage_data=pieces)


def _tensor(record: Any) -> TensorStorageMetadata:
    fields = _fields(record, "TensorStorageMetadata")
    properties = _record(fields["properties"], "TensorProperties").fields
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype):
        raise ConfigError("a tensor has no type")
    chunk_fields = [
        _fields(chunk, "ChunkStorageMetadata") for chunk in _typed(fields["chunks"], list)
    ]
    chunks = [
        ChunkStorageMetadata(offsets=_size(chunk["offsets"]), sizes=_size(chunk["sizes"]))
        for chunk in chunk_fields
    ]
    size = _size(fields["size"])
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(fields["fqn"], str),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _piece(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    name = _typed(fields["relative_path"], str)
    if fields.get("transform_descriptors"):
        raise ConfigError("a piece is transformed, which areal-gym never does")
    if not name.endswith(".distcp") or "/" in name or "\0" in name:
        raise ConfigError(f"a piece is in {name!r}, which is not a file of this checkpoint")
    return _StorageInfo(name, _count(fields["offset"]), _count(fields["length"]))


def _record(value: Any, name: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != name:
        raise ConfigError(f"a {name} is missing")
    return value


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    fields = _record(value, name).fields
    if isinstance(fields, tuple) and fields and isinstance(fields[0] or fields[-1], dict):
        fields = {**(fields[0] or {}), **(fields[-1] or {})}
    if not isinstance(fields, dict):
        raise ConfigError(f"a {name} has no fields")
    return fields


def _typed(value: Any, type_: type[_T]) -> _T:
    if type(value) is not type_:
        raise ConfigError(f"a {type_.__name__} is missing")
    return value


def _count(value: Any) -> int:
    count = _typed(value, int)
    if not 0 <= count < 2**63:
        raise ConfigError(f"{count} is not a count")
    return count


def _size(value: Any) -> torch.Size:
    numbers = _record(value, "Size").arguments
    if len(numbers) != 1 or not isinstance(numbers[0], tuple):
        raise ConfigError("a size is missing")
    return torch.Size([_count(number) for number in numbers[0]])
