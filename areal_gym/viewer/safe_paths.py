"""Safe reading of a run directory from an untrusted source: plain files, inside it, bounded."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from areal_gym.errors import DataError
from areal_gym.utils.files import (
    MAX_JSON_DEPTH,
    is_nested_deeper,
    open_data,
    read_bytes,
    read_json,
    read_yaml,
)

_MAX_SETTINGS = 20_000
"""The limit of values in a settings file."""
_MAX_GROWING_BYTES = 2**28
_MAX_SMALL = 2**15
_MAX_AT_ONCE = 2**20
"""Files up to this size are read as a whole when some of their lines are wanted."""
_MAX_LINE_BYTES = 2**14
"""The longest line that a sample of a larger file can see."""
# As runs write them: a quote inside of a JSON string has a backslash before it.
_STEP = re.compile(rb'\{"step": ([0-9]{1,15}),')
_REWARD = re.compile(rb'(?<!\\)"reward/mean": (-?[0-9][0-9.eE+-]{0,30})[,}]')


def contained(root: Path, file: Path) -> Path | None:
    """Return where a file of a directory really lies; None if outside, missing or not plain.

    Links may lead to other places of the directory. This does not guard against a
    process that writes to the directory at the same time.
    """
    try:
        # A plain file directly inside needs no look at the links on the way to it.
        if file.parent == root and stat.S_ISREG(os.lstat(file).st_mode):
            return file
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


_PLAIN = r"(null|[A-Za-z0-9][A-Za-z0-9_./@-]*)"
_SECTION = re.compile(r"^(env|engine|trainer):\n((?:  .*\n)+)", re.MULTILINE)
_TOP = re.compile(rf"^(steps|seed|objective): {_PLAIN}$", re.MULTILINE)
_INSIDE = re.compile(rf"^  (id|model|algorithm): {_PLAIN}$", re.MULTILINE)


def read_identity(root: Path, file: Path) -> dict[str, Any] | None:
    """Return the settings that a list of runs shows, from a file as runs write it, else None.

    It finds lines instead of parsing YAML, which takes a hundred times as long: what a list of
    thousands of runs is waited for. Whatever is not plain is left to `read_settings`.
    """
    if (place := contained(root, file)) is None:
        return None
    try:
        text = read_bytes(place, most=_MAX_AT_ONCE).decode("ascii")
    except (OSError, DataError, UnicodeDecodeError):
        return None
    if any(mark in text for mark in ("&", "*", "\t", "---", "<<", "|", ">", '"')):
        return None
    sections = {name: dict(_INSIDE.findall(body)) for name, body in _SECTION.findall(text)}
    top = dict(_TOP.findall(text))
    values = {
        **{name: top.get(name) for name in ("steps", "seed", "objective")},
        **{"env": sections.get("env", {}).get("id")},
        **{"algorithm": sections.get("trainer", {}).get("algorithm")},
        **{"model": sections.get("engine", {}).get("model")},
    }
    if any(value is None for value in values.values()):
        return None
    plain = {name: None if value == "null" else value for name, value in values.items()}
    counts: dict[str, int | None] = {"steps": None, "seed": None}
    for name in counts:
        if (digits := plain[name]) is not None:
            if not re.fullmatch("0|[1-9][0-9]{0,15}", digits):
                return None
            counts[name] = int(digits)
    return {
        **counts,
        "objective": plain["objective"],
        **{"env": {"id": plain["env"]}, "trainer": {"algorithm": plain["algorithm"]}},
        "engine": {"model": plain["model"]},
    }


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
        """Return up to `num` rows spread over the file, the first and the newest among them.

        Of a file that is not small and was not read before, only these are checked, and only
        `step` and numbers named like `reward/mean` are in them.
        """
        with self._lock:
            place = contained(self._root, self._path)
            if self._key[1] == 0 and place is not None and os.path.getsize(place) > _MAX_SMALL:
                return self._spread(place, num)
            rows = self._read()
        if len(rows) <= num:
            return rows
        return [rows[i * (len(rows) - 1) // (num - 1)] for i in range(num)]

    def _spread(self, place: Path, num: int) -> list[dict[str, Any]]:
        try:
            with open_data(place) as stream:
                size = os.fstat(stream.fileno()).st_size
                lines = _lines_of(stream, size, num)
        except (OSError, DataError):
            return []
        return [row for line in lines if (row := self._quick_row(line)) is not None]

    def _quick_row(self, line: bytes) -> dict[str, Any] | None:
        # Parsing 60 lines of 60 metrics takes as long as all the rest of a card.
        if (step := _STEP.match(line)) is None or not line.endswith(b"}"):
            return self._row(line)
        reward = _REWARD.search(line)
        value = None if reward is None else finite(float(reward[1]))
        return {"step": int(step[1]), "reward/mean": value}

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


def _lines_of(stream: BinaryIO, size: int, num: int) -> list[bytes]:
    """Return up to `num` whole lines spread over a file, the first and the last among them."""
    if size <= _MAX_AT_ONCE:
        lines = stream.read().split(b"\n")[:-1]
        if len(lines) <= num:
            return lines
        return [lines[i * (len(lines) - 1) // (num - 1)] for i in range(num)]
    lines_by_offset: dict[int, bytes] = {}
    for i in range(num):
        offset = i * (size - 1) // (num - 1)
        start = max(0, offset - _MAX_LINE_BYTES)
        stream.seek(start)
        raw = stream.read(offset - start + _MAX_LINE_BYTES)
        end = raw.find(b"\n", offset - start)
        end = raw.rfind(b"\n") if end < 0 else end  # the end of the file may be torn
        begin = raw.rfind(b"\n", 0, max(0, end)) + 1
        if end >= 0 and (begin > 0 or start == 0):
            lines_by_offset[start + begin] = raw[begin:end]
    return [line for _, line in sorted(lines_by_offset.items())]


def _flat(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return finite(value) if isinstance(value, int | float) else None
