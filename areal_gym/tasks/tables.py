"""Rows of tables: Parquet files and Arrow tables, pandas, and data sets of `datasets`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from areal_gym.errors import ConfigError, DataError
from areal_gym.tasks.rows import Rows, SourceRow, row_object
from areal_gym.utils.files import path_hints

_MAX_IN_MEMORY = 2**25
"""Bytes of a Parquet file that are unpacked in memory; others are unpacked to a temporary file."""
_BATCH = 1_000
_BUFFER = 2**20
"""Bytes of a column that are read at once; otherwise whole row groups are."""
_NEEDS_DATA = ("install it: pip install 'areal-gym[data]'",)


class ArrowRows(Rows):
    """Rows of Arrow batches, in memory or mapped from a file."""

    def __init__(self, batches: Sequence[Any], name: str, label: str) -> None:
        self.name = name
        self._label = label
        self._batches = batches
        self._ends = list(accumulate(batch.num_rows for batch in batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _read(self, index: int) -> SourceRow:
        number = bisect_right(self._ends, index)
        start = self._ends[number - 1] if number else 0
        where = f"{self.name}, row {index + 1}"
        try:
            row = self._batches[number].slice(index - start, 1).to_pylist()[0]
        except Exception as error:  # text that is not UTF-8, dates beyond year 9999, ...
            raise DataError(f"{where}: {type(error).__name__}: {error}") from error
        return SourceRow(where, f"{self._label}/{index + 1}", row)


def read_parquet(path: Path, label: str) -> Rows:
    """Return the rows of a Parquet file; a large one is unpacked to a temporary file."""
    problem = f"cannot read {path}"
    if not path.is_file():
        raise DataError(f"{problem}: No such file or directory", hints=path_hints(path))
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{problem}: it takes the package pyarrow", hints=_NEEDS_DATA) from None
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
            about = file.metadata
            groups = range(about.num_row_groups)
            size = sum(about.row_group(number).total_byte_size for number in groups)
            batches = file.iter_batches(_BATCH, use_threads=False)
            if size > _MAX_IN_MEMORY:
                return ArrowRows(_unpacked(pyarrow, batches, file.schema_arrow), str(path), label)
            return ArrowRows(list(batches), str(path), label)
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).strip().splitlines()
        raise DataError(f"{problem}: {reason[0] if reason else error!r}") from None


def _unpacked(pyarrow: Any, batches: Iterable[Any], schema: Any) -> list[Any]:
    """Return the batches from a temporary file that is mapped into memory and has no name."""
    descriptor, path = tempfile.mkstemp(suffix=".arrow")
    try:
        with os.fdopen(descriptor, "wb") as sink, pyarrow.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(path))
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    finally:
        os.unlink(path)


def arrow_rows(table: Any, name: str) -> Rows:
    """Return the rows of whatever hands out Arrow data: a table of pyarrow or polars."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            f"cannot read {name}: it takes the package pyarrow", hints=_NEEDS_DATA
        ) from None
    return ArrowRows(pyarrow.table(table).to_batches(max_chunksize=_BATCH), name, name)


class FrameRows(Rows):
    """Rows of a pandas DataFrame; missing values are None."""

    def __init__(self, frame: Any, name: str) -> None:
        self.name = name
        self._size = len(frame)
        self._columns = {str(column): frame[column].array for column in frame.columns}
        if len(self._columns) < len(frame.columns):
            raise DataError(f"{name}: two columns have the same name: {list(frame.columns)}")

    def __len__(self) -> int:
        return self._size

    def _read(self, index: int) -> SourceRow:
        data = {column: _plain(values[index]) for column, values in self._columns.items()}
        return SourceRow(f"{self.name}, row {index + 1}", f"{self.name}/{index + 1}", data)


def _plain(value: Any) -> Any:
    """Return a cell of pandas as Python has it."""
    if hasattr(value, "tolist"):  # a number or an array of numpy
        value = value.tolist()
    # NaN, NaT and NA differ from themselves, or cannot tell.
    is_missing = type(value).__name__ in ("NAType", "NaTType") or (
        isinstance(value, float) and value != value
    )
    return None if is_missing else value


class DatasetRows(Rows):
    """Rows of a `datasets.Dataset`; pictures are `{"bytes": ..., "path": ...}`, not decoded."""

    def __init__(self, dataset: Any, name: str, label: str | None = None) -> None:
        self.name = name
        features = dataset.features or {}
        shown = [column for column, feature in features.items() if _has_pictures(feature)]
        self._columns = list(features)
        # `datasets` would decode pictures by its own rules, and raise without naming the row.
        self._pictures = dataset.select_columns(shown).with_format("arrow") if shown else None
        self._dataset = dataset.remove_columns(shown) if shown else dataset
        self._has_others = len(shown) < len(features)
        self._label = name if label is None else label

    def __len__(self) -> int:
        return len(self._dataset if self._pictures is None else self._pictures)

    def _read(self, index: int) -> SourceRow:
        where = f"{self.name}, row {index + 1}"
        row = row_object(self._dataset[index] if self._has_others else {}, where)
        if self._pictures is not None:
            given = {**row, **self._pictures[index : index + 1].to_pylist()[0]}
            row = {column: given[column] for column in self._columns}
        return SourceRow(where, f"{self._label}/{index + 1}", row)


def _has_pictures(feature: Any) -> bool:
    """Return whether a feature of `datasets` is a picture, or a list of pictures."""
    inner = getattr(feature, "feature", None) or (feature[0] if isinstance(feature, list) else None)
    return type(inner or feature).__name__ == "Image"


def load_hub(name: str, subset: str | None, split: str | None = None) -> Mapping[str, Any]:
    """Return the splits of a data set on the Hugging Face hub, or of one in the cache.

    Raises:
        DataError: it cannot be had: no network, no such data set.
        ConfigError: the package `datasets` is not installed.
    """
    problem = f"cannot load the data set {name} from the hub"
    hints = (
        "is there a network? what was loaded once comes from the cache: HF_HUB_OFFLINE=1",
        "or give a file of your own: .jsonl, .csv, .parquet",
    )
    try:
        import datasets
        from datasets.exceptions import DatasetGenerationError
    except ImportError:
        raise ConfigError(f"{problem}: it takes the package datasets", hints=_NEEDS_DATA) from None
    try:
        with _cache_without_hub(name) as unreached:
            loaded = datasets.load_dataset(path=name, name=subset, split=split)
    except Exception as error:  # of requests, huggingface_hub, pyarrow, ...
        if isinstance(error, ConnectionError) and unreached:
            raise DataError(
                f"{problem}: {unreached}, and the cache has no such data set",
                hints=(
                    "is there a network? is HF_HUB_OFFLINE unset?",
                    f"where there is a network: hf download {name} --repo-type dataset "
                    f"--local-dir {Path(name).name}",
                    "then give a file of it: .jsonl, .csv, .parquet",
                ),
            ) from error
        # The data set was not generated: what says why stands behind that.
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        reason = str(cause or error).strip().splitlines()
        raise DataError(
            f"{problem}: {type(cause or error).__name__}: {reason[0] if reason else ''}",
            hints=hints,
        ) from error
    return loaded if split is None else {split: loaded}


@contextlib.contextmanager
def _cache_without_hub(name: str) -> Iterator[str]:
    """Let `datasets` use its cache at once if the hub cannot be reached; yield why not, or "".

    Its own retries take half a minute.
    """
    import datasets
    from huggingface_hub import HfApi, constants

    try:
        HfApi().dataset_info(name, timeout=10)
        is_reached = True
    except Exception as error:  # network errors are those of whichever package the client uses
        is_reached = getattr(error, "response", None) is not None
    unreached = ""
    if not is_reached:
        is_offline = bool(constants.HF_HUB_OFFLINE)
        unreached = "HF_HUB_OFFLINE is set" if is_offline else "the hub cannot be reached"
    switches: list[Any] = [datasets.config, constants] if unreached else []
    before = [module.HF_HUB_OFFLINE for module in switches]
    try:
        for module in switches:
            module.HF_HUB_OFFLINE = True
        yield unreached
    finally:
        for module, value in zip(switches, before, strict=True):
            module.HF_HUB_OFFLINE = value


def load_saved(folder: Path) -> Any:
    """Return what `save_to_disk` wrote to a folder: one data set, or one for each split."""
    problem = f"cannot read {folder}"
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{problem}: it takes the package datasets", hints=_NEEDS_DATA) from None
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{problem}: {type(error).__name__}: {error}") from error
