"""Rows of data from any source, as a sequence of known length; a row is read when requested.

    Rows           the interface: `len(rows)`, `rows[i]`, `rows.columns`, iteration
    SequenceRows   objects in memory: a list of dicts
    SpooledRows    an iterable, such as a generator or a stream; stored on disk if it is large
    JoinedRows     several data sets, one after another

Files are in `line_files` (JSON lines, CSV) and `tables` (Parquet, `datasets`, pandas).
"""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_gym.errors import DataError, GymError, NothingToDoError

NUM_SAMPLED = 100
"""When data is opened, this many rows at the beginning and as many spread over the rest are read,
which shows the columns and most mistakes. All others are checked when they are requested."""
_MAX_IN_MEMORY = 2**26
_MAX_SPOOLED = 2**36
"""The maximum bytes of a stream that are stored, so an endless generator does not fill the disk."""


class SourceRow(NamedTuple):
    """A row and the place that it comes from."""

    where: str
    """The row's place in messages: `questions.jsonl, line 3`."""
    label: str
    """The row's place in task ids: `questions/3`."""
    data: Mapping[str, Any]


class Rows(ABC):
    """The rows of one data set, in order; several threads may read.

    `rows[i]` raises a DataError that names the row if it is broken.
    """

    name: str
    """The data's name in messages: a path, an id on the hub, or `rows`."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def _read(self, index: int) -> SourceRow:
        """Return the row of a valid index."""

    def __getitem__(self, index: int) -> SourceRow:
        """Return a row; a negative index counts from the end."""
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"row {index} of {size:,}: {self.name}")
        return self._read(index % size)

    def __iter__(self) -> Iterator[SourceRow]:
        """Read one row after another."""
        return map(self._read, range(len(self)))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of the rows' fields, in order; in large data, those of about 200 rows."""
        return tuple(dict.fromkeys(name for row in self.sample() for name in row.data))

    def sample(self) -> Iterator[SourceRow]:
        """Read the first 100 rows and up to 100 spread over the others."""
        size = len(self)
        yield from map(self._read, range(min(size, NUM_SAMPLED)))
        step = max(1, (size - NUM_SAMPLED) // NUM_SAMPLED)
        yield from map(self._read, range(NUM_SAMPLED + step - 1, size, step))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self):,} rows>"


def checked_rows(rows: Rows) -> Rows:
    """Check a sample of the rows and return them; raise NothingToDoError if there are none."""
    if not len(rows):
        raise NothingToDoError(f"{rows.name} has no rows")
    assert rows.columns is not None  # reads the sample: a broken row raises now
    return rows


def row_object(row: Any, where: str) -> Mapping[str, Any]:
    """Return the row if it is an object with text keys; raise DataError otherwise."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"{where}: a row is an object, not {type(row).__name__}",
            hints=['such as {"prompt": "What is 2+2?", "answer": "4"}'],
        )
    if not all(isinstance(name, str) for name in row):
        name = next(name for name in row if not isinstance(name, str))
        raise DataError(f"{where}: the name of a field is {name!r}; a text is needed")
    return row


class SequenceRows(Rows):
    """Rows in memory: a list of dicts. They are not copied."""

    def __init__(self, rows: Sequence[Any], name: str, label: str | None = None) -> None:
        self.name = name
        self._rows = rows
        self._label = name if label is None else label

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, index: int) -> SourceRow:
        where = f"{self.name}, row {index + 1}"
        return SourceRow(where, f"{self._label}/{index + 1}", row_object(self._rows[index], where))


class SpooledRows(Rows):
    """Rows of an iterable, which the constructor reads; beyond 64 MB, a temporary file has them."""

    def __init__(self, rows: Iterable[Any], name: str, label: str | None = None) -> None:
        self.name = name
        self._label = name if label is None else label
        self._starts = array("q", [0])
        self._lock = threading.Lock()
        # The file has no name and disappears with this object.
        self._file = tempfile.SpooledTemporaryFile(max_size=_MAX_IN_MEMORY)  # noqa: SIM115
        try:
            for number, row in enumerate(self._guarded(rows), start=1):
                data = dict(row_object(row, f"{name}, row {number}"))
                size = self._file.write(self._pickled(data, number))
                self._starts.append(self._starts[-1] + size)
                if self._starts[-1] > _MAX_SPOOLED:
                    raise DataError(
                        f"{name} does not end: {number:,} rows take {_MAX_SPOOLED // 2**30} GB",
                        hints=["give a part of it: itertools.islice(rows, 100_000)"],
                    )
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _read(self, index: int) -> SourceRow:
        start, end = self._starts[index], self._starts[index + 1]
        with self._lock:
            self._file.seek(start)
            raw = self._file.read(end - start)
        label = f"{self._label}/{index + 1}"
        return SourceRow(f"{self.name}, row {index + 1}", label, pickle.loads(raw))

    def _guarded(self, rows: Iterable[Any]) -> Iterator[Any]:
        """Yield the rows; raise DataError with the row's number if the iterable raises."""
        num_read = 0
        try:
            for row in rows:
                yield row
                num_read += 1
        except GymError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.name} failed after row {num_read}: {type(error).__name__}: {error}"
            ) from error

    def _pickled(self, data: Mapping[str, Any], number: int) -> bytes:
        try:
            return pickle.dumps(data, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise DataError(
                f"{self.name}, row {number}: it cannot be kept: {error}",
                hints=["rows hold texts, numbers, lists and dicts; a list of rows is not copied"],
            ) from error

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            file.close()


class JoinedRows(Rows):
    """Several data sets, one after another, as one."""

    def __init__(self, parts: Sequence[Rows], name: str) -> None:
        self.name = name
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _read(self, index: int) -> SourceRow:
        number = bisect_right(self._ends, index)
        start = self._ends[number - 1] if number else 0
        return self._parts[number][index - start]


class SelectedRows(Rows):
    """Selected rows of a data set, in order."""

    def __init__(self, rows: Rows, indices: NDArray[np.int64]) -> None:
        self.name = rows.name
        self._rows = rows
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def _read(self, index: int) -> SourceRow:
        return self._rows[int(self._indices[index])]


def unnamed_file(directory: str | None = None) -> int:
    """Return the descriptor of a new temporary file, which is deleted when it is closed."""
    descriptor, path = tempfile.mkstemp(dir=directory)
    os.unlink(path)
    return descriptor
