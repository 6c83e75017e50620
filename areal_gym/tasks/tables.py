"""Rows of Parquet files, Arrow tables, pandas DataFrames, and data sets of `datasets`."""

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
"""The size in bytes up to which Parquet data is unpacked in memory, not to a temporary file."""
_BATCH = 1_000
_BUFFER = 2**20
"""The bytes of a column that are read at once, instead of whole row groups."""
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
            metadata = file.metadata
            groups = range(metadata.num_row_groups)
            size = sum(metadata.row_group(number).total_byte_size for number in groups)
            batches = file.iter_batches(_BATCH, use_threads=False)
            if size > _MAX_IN_MEMORY:
                return ArrowRows(_unpacked(pyarrow, batches, file.schema_arrow), str(path), label)
            return ArrowRows(list(batches), str(path), label)
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).strip().splitlines()
        raise DataError(f"{problem}: {reason[0] if reason else error!r}") from None


def _unpacked(pyarrow: Any, batches: Iterable[Any], schema: Any) -> list[Any]:
    """Write the batches to a temporary file without a name, and map it into memory."""
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
    """Return the rows of an object that exports Arrow data: a table of pyarrow or polars."""
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
    """Return a cell of pandas as a Python object; None if it is missing."""
    if hasattr(value, "tolist"):  # a number or an array of numpy
        value = value.tolist()
    # NaN is not equal to itself; NaT and NA cannot be compared.
    is_missing = type(value).__name__ in ("NAType", "NaTType") or (
        isinstance(value, float) and value != value
    )
    return None if is_missing else value


class DatasetRows(Rows):
    """Rows of a `datasets.Dataset`; images stay encoded, as `{"bytes": ..., "path": ...}`."""

    def __init__(self, dataset: Any, name: str, label: str | None = None) -> None:
        self.name = name
        features = dataset.features or {}
        image_columns = [column for column, feature in features.items() if _has_images(feature)]
        self._columns = list(features)
        self._images = None
        self._dataset = dataset
        if image_columns:
            # `datasets` would decode images by its own rules, and raise without naming the row.
            self._images = dataset.select_columns(image_columns).with_format("arrow")
            self._dataset = dataset.remove_columns(image_columns)
        self._has_others = len(image_columns) < len(features)
        self._label = name if label is None else label

    def __len__(self) -> int:
        return len(self._dataset if self._images is None else self._images)

    def _read(self, index: int) -> SourceRow:
        where = f"{self.name}, row {index + 1}"
        row = row_object(self._dataset[index] if self._has_others else {}, where)
        if self._images is not None:
            unordered = {**row, **self._images[index : index + 1].to_pylist()[0]}
            row = {column: unordered[column] for column in self._columns}
        return SourceRow(where, f"{self._label}/{index + 1}", row)


def _has_images(feature: Any) -> bool:
    """Return whether a feature of `datasets` is an image, or a list of images."""
    inner = getattr(feature, "feature", None) or (feature[0] if isinstance(feature, list) else None)
    return type(inner or feature).__name__ == "Image"


def load_hub(name: str, subset: str | None, split: str | None = None) -> Mapping[str, Any]:
    """Return the splits of a data set on the Hugging Face hub, or of one in the cache.

    Raises:
        DataError: there is no network, or no such data set.
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
    except Exception as error:  # from requests, huggingface_hub, pyarrow, ...
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
        # The reason is the cause of a DatasetGenerationError.
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        reason = str(cause or error).strip().splitlines()
        raise DataError(
            f"{problem}: {type(cause or error).__name__}: {reason[0] if reason else ''}",
            hints=hints,
        ) from error
    return loaded if split is None else {split: loaded}


@contextlib.contextmanager
def _cache_without_hub(name: str) -> Iterator[str]:
    """Let `datasets` use its cache at once if the hub cannot be reached.

    Otherwise its retries take half a minute. Yields the reason why the hub is not used, or "".
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
    """Return the content of a folder from `save_to_disk`: a data set, or one for each split."""
    problem = f"cannot read {folder}"
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{problem}: it takes the package datasets", hints=_NEEDS_DATA) from None
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{problem}: {type(error).__name__}: {error}") from error
