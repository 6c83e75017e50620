"""Safe reading of a run directory from an untrusted source: plain files, inside it, bounded."""

from __future__ import annotations

import json
import math
import os
import stat
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any

from areal_gym.errors import DataError
from areal_gym.utils.files import MAX_JSON_DEPTH, is_nested_deeper, open_data, read_json, read_yaml

_MAX_SETTINGS = 20_000
"""The limit of values in a settings file."""
_MAX_GROWING_BYTES = 2**28
_MAX_SAMPLED = 2**18
"""Files up to this size are read whole, larger ones by samples."""
_MAX_LINE_BYTES = 2**14
"""The longest line that a sample can see."""


def contained(root: Path, file: Path) -> Path | None:
    """Return where a file of a directory really lies; None if outside, missing or not plain.

    Links may lead to other places of the directory. This does not guard against a
    process that writes to the directory at the same time.
    """
    try:
        home, place = os.path.realpath(root), os.path.realpath(file)
        if not place.startswith(home.rstrip(os.sep) + os.sep):
            return None
        return Path(place) if stat.S_ISREG(os.stat(place).st_mode) else None
    except (OSError, ValueError):
        return None


def read_object(root: Path, file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a directory, empty without the file; else DataError."""
    if (place := contained(root, file)) is None:
        return {}
    try:
        content = read_json(place)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    if is_nested_deeper(content, MAX_JSON_DEPTH):
        raise DataError(f"{file} is nested too deeply")
    return content


def read_settings(root: Path, file: Path) -> dict[str, Any]:
    """Return the settings of a run as JSON can hold them; empty when they cannot be read."""
    if (place := contained(root, file)) is None:
        return {}
    num_left = _MAX_SETTINGS

    def plain(value: Any, depth: int) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left < 0 or depth > MAX_JSON_DEPTH:
            raise DataError("these are not settings of a run: too many, or nested too deeply")
        if isinstance(value, dict):
            return {str(key): plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set):
            return [plain(item, depth + 1) for item in value]
        if isinstance(value, date | bytes):
            return str(value)
        return finite(value) if isinstance(value, int | float) else value

    try:
        settings = plain(read_yaml(place), 0)
    except (OSError, DataError):
        return {}
    return settings if isinstance(settings, dict) else {}


def finite(value: Any) -> Any:
    """Return a number that JSON and a browser can hold, None for any other number."""
    if isinstance(value, bool):
        return value
    try:
        return value if math.isfinite(float(value)) else None
    except (OverflowError, TypeError, ValueError):
        return None


class GrowingFile:
    """Rows of a JSON lines file that grows, or is replaced by a shorter one by a resumed run.

    A line that is not a row (torn, damaged, without a step) is counted and skipped. In a flat
    file, values are numbers and short texts; others become null.
    """

    def __init__(self, root: Path, path: Path, *, is_flat: bool) -> None:
        self.num_damaged = 0
        self._root = root
        self._path = path
        self._is_flat = is_flat
        self._lock = Lock()
        self._key = (0, 0)
        """The inode, and the number of bytes that were read."""
        self._rows: list[dict[str, Any]] = []

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows so far; only what was appended since the last time is read."""
        with self._lock:
            return self._read()

    def sample(self, num: int) -> list[dict[str, Any]]:
        """Return about `num` rows spread over the file, with the first and the newest one.

        Of a large file that was not read before, only these are read and checked.
        """
        with self._lock:
            place = contained(self._root, self._path)
            if self._key[1] == 0 and place is not None and os.path.getsize(place) > _MAX_SAMPLED:
                return self._spread(place, num)
            rows = self._read()
        if len(rows) <= num:
            return rows
        return [rows[i * (len(rows) - 1) // (num - 1)] for i in range(num)]

    def _spread(self, place: Path, num: int) -> list[dict[str, Any]]:
        rows: dict[int, dict[str, Any]] = {}
        try:
            with open_data(place) as stream:
                size = os.fstat(stream.fileno()).st_size
                for i in range(num):
                    offset = i * (size - 1) // (num - 1)
                    # Back to the start of a line; the end of the file may be torn.
                    start = max(0, offset - _MAX_LINE_BYTES)
                    stream.seek(start)
                    raw = stream.read(offset - start + _MAX_LINE_BYTES)
                    end = raw.find(b"\n", offset - start)
                    end = raw.rfind(b"\n") if end < 0 else end
                    begin = raw.rfind(b"\n", 0, max(0, end)) + 1
                    is_whole_line = end >= 0 and (begin > 0 or start == 0)
                    if is_whole_line and (row := self._row(raw[begin:end])) is not None:
                        rows[start + begin] = row
        except (OSError, DataError):
            return []
        return [rows[offset] for offset in sorted(rows)]

    def _read(self) -> list[dict[str, Any]]:
        place = contained(self._root, self._path)
        if place is None:
            return []
        try:
            with open_data(place) as stream:
                facts = os.fstat(stream.fileno())
                inode, position = self._key
                if facts.st_ino != inode or facts.st_size < position:
                    position, self._rows, self.num_damaged = 0, [], 0
                stream.seek(position)
                new = stream.read(max(0, _MAX_GROWING_BYTES - position))
        except (OSError, DataError):
            return []
        new = new[: new.rfind(b"\n") + 1]
        rows = list(self._rows) if new else self._rows
        for line in new.split(b"\n")[:-1]:
            if (row := self._row(line)) is None:
                self.num_damaged += 1
            else:
                rows.append(row)
        self._rows = rows
        self._key = (facts.st_ino, position + len(new))
        return rows

    def _row(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
        if not isinstance(row, dict) or is_nested_deeper(row, MAX_JSON_DEPTH):
            return None
        step = finite(row.get("step", 0))
        if step is None or isinstance(step, bool) or step != int(step):
            return None
        if self._is_flat:
            row = {name: _flat(value) for name, value in row.items()}
        return {**row, "step": int(step)}


def _flat(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return finite(value) if isinstance(value, int | float) else None
