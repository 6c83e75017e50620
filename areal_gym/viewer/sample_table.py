"""The samples of an evaluation as columns, read page by page while they are still written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from areal_gym.errors import DataError, UnknownIdError
from areal_gym.run_dir.evaluations import sample_of
from areal_gym.run_dir.trajectory_files import TrajectoryFile
from areal_gym.utils.files import open_data
from areal_gym.viewer.safe_paths import contained, finite

_NUMBERS = ("index", "attempt", "reward", "turns", "tokens", "seconds")
_TEXTS = ("task", "env", "stop", "preview")
COLUMNS = (*_NUMBERS, *_TEXTS, "success", "error")
"""The columns that a page gets; `SAMPLE_KEYS` says what they are."""
_CHUNK_BYTES = 2**20


class SampleTable:
    """Samples in the order in which they ended; a later row of the same attempt replaces it.

    They are lines of `samples`, or without that file the heads of the trajectories' lines.
    Several threads may read.
    """

    def __init__(self, root: Path, trajectories: Path, samples: Path | None) -> None:
        self._root, self._trajectories, self._samples = root, trajectories, samples
        self._lock = Lock()
        self._clear(None)

    def page(self, start: int = 0, limit: int | None = None) -> dict[str, Any]:
        """Return rows from `start` on as columns.

        `version` changes when the file is replaced by another one; rows that were read before
        are no longer valid then. `is_last` says that no more are there now.
        """
        with self._lock:
            end = None if limit is None else start + limit
            has_all = self._read_until(end)
            columns = {name: values[start:end] for name, values in self._columns.items()}
            num = len(self._places)
            return {
                "version": self._version,
                "columns": columns,
                "num_damaged": self._num_damaged,
                "is_last": has_all and (end is None or end >= num),
            }

    def read(self, place: int) -> dict[str, Any]:
        """Read the trajectory of the row at `place`; raise UnknownIdError or DataError."""
        with self._lock:
            self._read_until(place + 1)
            if not 0 <= place < len(self._places):
                raise UnknownIdError(f"there is no sample {place}")
            offset, num_bytes = self._places[place]
        if contained(self._root, self._trajectories) is None:
            raise DataError(f"{self._trajectories} is missing, or not a plain file")
        return TrajectoryFile(self._trajectories).read_at(offset, num_bytes, place=place)

    def _clear(self, version: str | None) -> None:
        self._version = version
        self._position = 0
        self._num_damaged = 0
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self._places: list[tuple[int, int]] = []
        self._heads: TrajectoryFile | None = None

    def _read_until(self, end: int | None) -> bool:
        """Read rows up to `end`, all without one; return whether these are all there are."""
        file = contained(self._root, self._samples or self._trajectories)
        if file is None:
            self._clear(None)
            return True
        facts = os.stat(file)
        version = f"{facts.st_ino}"
        if self._samples is None:  # such files appear whole
            version += f"-{facts.st_mtime_ns}-{facts.st_size}"
        if version != self._version or facts.st_size < self._position:
            self._clear(version)
        if self._samples is None:
            return self._read_heads(file, end)
        with open_data(file) as stream:
            while end is None or len(self._places) < end:
                stream.seek(self._position)
                chunk = stream.read(_CHUNK_BYTES)
                if len(chunk) == _CHUNK_BYTES and b"\n" not in chunk:
                    chunk += stream.readline()
                chunk = chunk[: chunk.rfind(b"\n") + 1]
                if not chunk:
                    return True
                for line in chunk.split(b"\n")[:-1]:
                    if (row := _parsed(line)) is None:
                        self._num_damaged += 1
                    else:
                        self._add(row)
                self._position += len(chunk)
        return self._position >= facts.st_size

    def _read_heads(self, file: Path, end: int | None) -> bool:
        self._heads = self._heads or TrajectoryFile(file)
        start = len(self._places)
        limit = None if end is None else max(0, end - start)
        heads = self._heads.page(start, limit)
        for head in heads:
            self._add(sample_of(head))
        return limit is None or len(heads) < limit

    def _add(self, row: Mapping[str, Any]) -> None:
        columns = self._columns
        for name in _NUMBERS:
            value = row.get(name)
            columns[name].append(value if type(value) is int and value < 2**53 else finite(value))
        for name in _TEXTS:
            value = row.get(name)
            is_text = type(value) is str
            columns[name].append(value if is_text else "" if value is None else f"{value}")
        success, error = row.get("success"), row.get("error")
        columns["success"].append(success if isinstance(success, bool) else None)
        columns["error"].append(None if error is None else f"{error}")
        offset, num_bytes = row.get("offset"), row.get("bytes")
        if not isinstance(offset, int) or not isinstance(num_bytes, int) or offset < 0:
            offset, num_bytes = 0, 0  # `read` finds no line there
        self._places.append((offset, max(0, num_bytes)))


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_sample = isinstance(row, dict) and row.keys() >= {"index", "attempt", "task", "success"}
    return row if is_sample else None
