"""Open data in any form: Python objects, files, folders, data sets on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_gym.errors import DataError, UsageError, choices
from areal_gym.tasks.line_files import CsvRows, JsonLineRows, read_json
from areal_gym.tasks.rows import JoinedRows, Rows, SequenceRows, SpooledRows, checked_rows
from areal_gym.tasks.tables import (
    DatasetRows,
    FrameRows,
    arrow_rows,
    load_hub,
    load_saved,
    read_parquet,
)
from areal_gym.utils.files import path_hints

_READERS = {
    ".jsonl": JsonLineRows,
    ".ndjson": JsonLineRows,
    ".json": read_json,
    ".csv": CsvRows,
    ".tsv": CsvRows,
    ".parquet": read_parquet,
}
_KINDS = ".jsonl, .json, .csv, .tsv (each also with .gz), .parquet"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]*){0,2}")
_SPLITS = ("train", "test", "validation", "dev")
_FORMS = (
    "a list of dicts, a pandas DataFrame or a datasets.Dataset",
    f"a file: {_KINDS}; or a folder of them, or of save_to_disk",
    "a data set of the hub: NAME, NAME:SUBSET or NAME:SUBSET:SPLIT",
)


def open_rows(data: Any, *, split: str | None = None) -> Rows:
    """Open data: count its rows and check a sample of them; a row is read when it is requested.

    Args:
        data: a list of dicts, an iterable, a pandas DataFrame, a data set of `datasets`, a path, or
            an id on the hub (`NAME[:SUBSET][:SPLIT]`).
        split: the split to open if there are several; by default, it is "train".

    Raises:
        DataError: the data is missing or broken; the message names the row.
        NothingToDoError: there are no rows.
        ConfigError: a package that is needed is not installed.
    """
    if isinstance(data, Rows):
        return data
    splits = open_splits(data)
    if split is None:
        split = "train" if len(splits) > 1 else next(iter(splits))
    if split not in splits:
        raise DataError(f"{describe(data)} has no split {split!r}", hints=choices(split, splits))
    return splits[split]


def open_splits(data: Any) -> dict[str, Rows]:
    """Open data that may have several splits, see `open_rows`; without splits, it is "train"."""
    if isinstance(data, str | Path):
        return {name: checked_rows(rows) for name, rows in _named(data).items()}
    splits = data if _is_splits(data) else {"train": data}
    if not splits:
        raise UsageError("data without a split: {}", hints=_FORMS)
    name = "rows" if splits is not data else "{}"
    return {
        str(key): checked_rows(_from_object(rows, name.format(key))) for key, rows in splits.items()
    }


def describe(data: Any) -> str:
    """Return the name of the data in messages."""
    return str(data) if isinstance(data, str | Path) else "rows"


def _is_splits(data: Any) -> bool:
    """Return whether the object maps names to data sets, such as a `DatasetDict`."""
    return isinstance(data, Mapping) and all(
        isinstance(name, str) and not isinstance(rows, int | float | bool | None)
        for name, rows in data.items()
    )


def _from_object(data: Any, name: str) -> Rows:
    library = type(data).__module__.partition(".")[0]
    if isinstance(data, str | Path | Rows):
        return open_rows(data)
    if library == "pandas" and hasattr(data, "columns"):
        return FrameRows(data, name)
    if library == "datasets" and hasattr(data, "__len__"):
        return DatasetRows(data, name)
    if hasattr(data, "__arrow_c_stream__"):
        return arrow_rows(data, name)
    if isinstance(data, Sequence) and not isinstance(data, bytes | bytearray):
        return SequenceRows(data, name)
    if isinstance(data, Iterable) and not isinstance(data, bytes | bytearray | Mapping):
        return SpooledRows(data, name)
    raise UsageError(f"data is a {type(data).__name__}, which has no rows", hints=_FORMS)


def _named(data: str | Path) -> dict[str, Rows]:
    """Return the splits of a file, a folder, or a data set on the hub."""
    path = Path(data).expanduser()
    if path.is_dir():
        return _folder(path)
    is_file = path.exists() or isinstance(data, Path) or _suffix(path) in _READERS
    if not is_file and _HUB_ID.fullmatch(str(data)):
        return _hub(str(data))
    return {"train": read_rows(path)}


def read_rows(path: Path) -> Rows:
    """Return the rows of a file, which may have none; see `open_rows`."""
    reader = _READERS.get(_suffix(path))
    if reader is not None and not (reader is read_parquet and path.suffix == ".gz"):
        return reader(path, path.name.split(".")[0])
    problem = "unknown kind of file" if path.exists() else "No such file or directory"
    raise DataError(f"cannot read {path}: {problem}", hints=[*path_hints(path), f"known: {_KINDS}"])


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _folder(path: Path) -> dict[str, Rows]:
    """Return the splits of a folder from `save_to_disk`, or of data files by their names."""
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        saved = load_saved(path)
        splits = saved if isinstance(saved, Mapping) else {"train": saved}
        return {
            str(name): DatasetRows(rows, f"{path}, split {name}", f"{path.name}-{name}")
            for name, rows in splits.items()
        }
    files = [file for file in sorted(path.iterdir()) if _suffix(file) in _READERS]
    if not files:
        raise DataError(f"{path} has no file of data", hints=[f"known: {_KINDS}"])
    by_split: dict[str, list[Rows]] = {}
    for file in files:
        by_split.setdefault(_split_of_file(file), []).append(read_rows(file))
    return {
        split: parts[0] if len(parts) == 1 else JoinedRows(parts, str(path))
        for split, parts in by_split.items()
    }


def _split_of_file(file: Path) -> str:
    """Return the split with which a file's name begins, as on the hub: `test-00000-of-00001`."""
    word = re.split(r"[^a-z]", file.name.lower())[0]
    return {"valid": "validation", "val": "validation", "dev": "validation"}.get(
        word, word if word in _SPLITS else "train"
    )


def _hub(id: str) -> dict[str, Rows]:
    name, *rest = id.split(":")
    if len(rest) == 1 and rest[0] in _SPLITS:
        rest.insert(0, "")
    subset, split = (part or None for part in (*rest, "", "")[:2])
    return hub_splits(name, subset, split)


def hub_splits(name: str, subset: str | None, split: str | None = None) -> dict[str, Rows]:
    """Return the splits of a data set on the Hugging Face hub, or only `split`."""
    label = name.rpartition("/")[2]
    return {
        key: DatasetRows(rows, f"{name}, split {key}", f"{label}-{key}")
        for key, rows in load_hub(name, subset, split).items()
    }
