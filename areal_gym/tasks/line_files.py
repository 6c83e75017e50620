"""Rows of text files: JSON lines, and CSV with the standard library.

A file is scanned once to find where its rows begin (a gigabyte takes about half a second); a row is
read and parsed when it is requested. An open file takes eight bytes of memory per row.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_gym.errors import DataError
from areal_gym.tasks.rows import Rows, SequenceRows, SourceRow, row_object, unnamed_file
from areal_gym.utils.command_words import quoted
from areal_gym.utils.files import path_hints

MAX_ROW = 2**26
"""The maximum size of a row in bytes; no prompt is that long, so it must be a mistake."""
_MAX_JSON = 2**30
"""The maximum size of a `.json` file in bytes, as it has to be read completely."""
_CHUNK = 2**22
_SPACES = np.isin(np.arange(256), list(b" \t\r\v\f\n"))


class _Bytes:
    """A file that threads read at any offset; a compressed file is unpacked first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            try:
                if path.is_dir():
                    raise IsADirectoryError(0, "it is a directory")
                if path.suffix == ".gz":
                    packed, self._descriptor = self._descriptor, unnamed_file()
                    _unpack(packed, self._descriptor)
            except BaseException:
                os.close(self._descriptor)
                raise
        except (OSError, EOFError, zlib.error) as error:
            raise unreadable(path, error) from None
        weakref.finalize(self, os.close, self._descriptor)
        state = os.fstat(self._descriptor)
        self.size = state.st_size
        self._modified_ns = state.st_mtime_ns

    def chunks(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield the file's content in chunks, each with its offset."""
        position = 0
        while chunk := self.at(position, _CHUNK):
            yield position, np.frombuffer(chunk, np.uint8)
            position += len(chunk)

    def at(self, start: int, size: int) -> bytes:
        """Return `size` bytes from the offset `start` on."""
        try:
            return os.pread(self._descriptor, size, start)
        except OSError as error:
            raise unreadable(self.path, error) from None

    def require_unchanged(self) -> None:
        """Raise DataError if another program wrote to the file since it was opened."""
        state = os.fstat(self._descriptor)
        if (state.st_size, state.st_mtime_ns) != (self.size, self._modified_ns):
            raise DataError(
                f"{self.path} was changed while it was in use",
                hints=["write a new file and rename it over the old one, then start again"],
            )


def _unpack(packed: int, unpacked: int) -> None:
    with (
        open(packed, "rb") as file,
        gzip.GzipFile(fileobj=file) as source,
        open(unpacked, "wb", closefd=False) as target,
    ):
        shutil.copyfileobj(source, target, _CHUNK)


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or str(error)
    return DataError(f"cannot read {path}: {reason}", hints=path_hints(path))


def _decoded(raw: bytes, where: str, *, is_first: bool) -> str:
    try:
        return raw.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        is_utf_16 = is_first and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        encoding = "UTF-16" if is_utf_16 else "LATIN1"
        raise DataError(
            f"{where}: not UTF-8: {error}",
            hints=[f"convert the file: iconv -f {encoding} -t UTF-8 OLD > NEW"],
        ) from None


def parse_json(text: str, where: str) -> Any:
    """Parse a JSON text; raise DataError with `where` if it is not valid."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        is_one_line = "\n" not in text.rstrip("\n")
        if is_one_line:
            place = f"column {error.pos + 1}"
        raise DataError(f"{where}: not JSON: {error.msg}, in {place}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise DataError(f"{where}: nested too deeply") from None


class _FileRows(Rows):
    """Rows of a file, given the offsets at which they start."""

    _unit: str
    """The word for a row in messages: "line" or "row"."""

    def __init__(self, file: _Bytes, starts: NDArray[np.int64], label: str) -> None:
        self.name = str(file.path)
        self._file = file
        self._label = label
        self._starts = starts
        """The offset of each line, and at the end the size of the file."""
        self._kept: NDArray[np.int64] | None = None
        """The numbers of the lines that are rows; None if all lines are."""
        sizes = np.diff(starts)
        if sizes.size and (longest := int(sizes.argmax())) >= 0 and sizes[longest] > MAX_ROW:
            raise DataError(
                f"{self._where(longest)}: {int(sizes[longest]):,} bytes long; "
                f"at most {MAX_ROW:,} are read",
                hints=["is a line break missing? a row is one line of the file"],
            )

    def __len__(self) -> int:
        return len(self._starts) - 1 if self._kept is None else len(self._kept)

    def _where(self, line: int) -> str:
        return f"{self.name}, {self._unit} {line + 1}"

    def _raw(self, line: int) -> bytes:
        start = int(self._starts[line])
        return self._file.at(start, int(self._starts[line + 1]) - start)

    def _read(self, index: int) -> SourceRow:
        line = index if self._kept is None else int(self._kept[index])
        where = self._where(line)
        try:
            data = self._parsed(self._raw(line), line, where)
        except DataError:
            self._file.require_unchanged()
            raise
        return SourceRow(where, f"{self._label}/{line + 1}", data)

    def _parsed(self, raw: bytes, line: int, where: str) -> Any:
        raise NotImplementedError


class JsonLineRows(_FileRows):
    """A file with a JSON object per line; blank lines are skipped."""

    _unit = "line"

    def __init__(self, path: Path, label: str) -> None:
        file = _Bytes(path)
        starts, blank = _lines(file)
        super().__init__(file, starts, label)
        if blank:
            self._kept = np.delete(np.arange(len(starts) - 1), blank)

    def _parsed(self, raw: bytes, line: int, where: str) -> Any:
        text = _decoded(raw, where, is_first=line == 0)
        try:
            return row_object(parse_json(text, where), where)
        except DataError as error:
            cat = "zcat" if self._file.path.suffix == ".gz" else "cat"
            see = f"see it: {cat} {quoted(self._file.path)} | sed -n {line + 1}p"
            raise DataError(error.message, hints=[*error.hints, see]) from None


def _lines(file: _Bytes) -> tuple[NDArray[np.int64], list[int]]:
    """Return the offsets of the lines and of the file's end, and the numbers of blank lines."""
    pieces, maybe_blank = [np.zeros(1, np.int64)], []
    begins = True  # whether a line begins at the chunk's start
    for position, chunk in file.chunks():
        firsts = np.flatnonzero(chunk == 10) + 1
        starts = firsts[firsts < len(chunk)]
        if begins:
            starts = np.concatenate(([0], starts))
        maybe_blank.append(starts[_SPACES[chunk[starts]]] + position)
        begins = bool(chunk[-1] == 10)
        pieces.append(firsts + position)
    ends = np.concatenate(pieces)
    if ends[-1] != file.size:
        ends = np.append(ends, file.size)
    if len(ends) == 2 and ends[1] == 0:
        ends = ends[:1]
    numbers = np.searchsorted(ends, np.concatenate([np.zeros(0, np.int64), *maybe_blank]))
    sizes = np.diff(ends)
    blank = [
        number
        for number in numbers.tolist()
        if sizes[number] <= MAX_ROW and not file.at(int(ends[number]), int(sizes[number])).strip()
    ]
    return ends, blank


class CsvRows(_FileRows):
    """A CSV or TSV file whose first row names the columns; every cell is a string.

    Quoted cells may contain delimiters and line breaks. Row 1 is the first one below the names.
    """

    _unit = "row"

    def __init__(self, path: Path, label: str) -> None:
        if csv.field_size_limit() < MAX_ROW:
            csv.field_size_limit(MAX_ROW)  # the default, 128 kB, is less than a long document
        file = _Bytes(path)
        first = file.at(0, 2**16).split(b"\n", 1)[0]
        is_tsv = ".tsv" in path.suffixes
        # Spreadsheet programs write semicolons in countries with decimal commas.
        is_semicolons = b"," not in first and b";" in first
        self._delimiter = "\t" if is_tsv else ";" if is_semicolons else ","
        starts = _records(file, self._delimiter)
        if starts is None:
            starts = _records_one_by_one(file, self._delimiter)
        self.names = self._header(file, starts)
        super().__init__(file, starts[1:] if len(starts) > 1 else starts, label)
        self._kept = self._rows_with_content()

    def _header(self, file: _Bytes, starts: NDArray[np.int64]) -> list[str]:
        if len(starts) < 2:
            return []
        where = f"{file.path}, the names of the columns"
        if starts[1] > MAX_ROW:
            raise DataError(
                f"{where}: {int(starts[1]):,} bytes long; at most {MAX_ROW:,} are read",
                hints=["is a line break missing? the first line names the columns"],
            )
        raw = file.at(0, int(starts[1]))
        names = self._cells(_decoded(raw, where, is_first=True), where)
        repeated = [name for name in names if names.count(name) > 1]
        if repeated or not all(name.strip() for name in names):
            problem = f"column {repeated[0]!r} occurs twice" if repeated else "a column has no name"
            raise DataError(f"{where}: {problem}", hints=["the first line names the columns"])
        return names

    def _rows_with_content(self) -> NDArray[np.int64] | None:
        sizes = np.diff(self._starts)
        short = np.flatnonzero(sizes <= 2)
        blank = [number for number in short.tolist() if not self._raw(number).strip(b"\r\n")]
        return np.delete(np.arange(len(sizes)), blank) if blank else None

    def _parsed(self, raw: bytes, line: int, where: str) -> Any:
        cells = self._cells(_decoded(raw, where, is_first=False), where)
        if len(cells) != len(self.names):
            raise DataError(
                f"{where}: {len(cells)} cells, but {len(self.names)} columns are named",
                hints=[
                    f"the columns: {', '.join(self.names)}",
                    f"a cell that holds {self._delimiter!r} or a quote is written in quotes",
                ],
            )
        return dict(zip(self.names, cells, strict=True))

    def _cells(self, text: str, where: str) -> list[str]:
        try:
            # An odd number of quotes: one is not closed, or one is inside an unquoted cell.
            is_strict = text.count('"') % 2 == 1
            lines = io.StringIO(text, newline="")
            records = list(csv.reader(lines, delimiter=self._delimiter, strict=is_strict))
        except csv.Error as error:
            raise DataError(
                f"{where}: not CSV: {error}", hints=["is a quote of this row not closed?"]
            ) from None
        return records[0] if records else []


def _records(file: _Bytes, delimiter: str) -> NDArray[np.int64] | None:
    """Return the offsets of the records; None if quotes occur inside unquoted cells.

    A line break ends a record if the number of quotes before it is even. This rule is valid only
    if every opening quote follows a delimiter, a line break, or the quote that it doubles.
    """
    before_opening = np.isin(np.arange(256), list(f'\n\r"{delimiter}'.encode()))
    pieces = [np.zeros(1, np.int64)]
    is_open, before = 0, 10
    for position, chunk in file.chunks():
        ends = np.flatnonzero(chunk == 10)
        quotes = np.flatnonzero(chunk == 34)
        opening = quotes[is_open::2]
        previous = chunk[opening - 1]
        if opening.size and opening[0] == 0:
            previous[0] = before
        is_first = position == 0 and opening.size and bytes(chunk[: opening[0]]) == b"\xef\xbb\xbf"
        if not before_opening[previous[1 if is_first else 0 :]].all():
            return None
        if quotes.size or is_open:
            ends = ends[(np.searchsorted(quotes, ends) + is_open) % 2 == 0]
        is_open = (is_open + len(quotes)) % 2
        before = int(chunk[-1])
        pieces.append(ends + 1 + position)
    if is_open:
        return None  # the last quote is not closed
    starts = np.concatenate(pieces)
    return starts if starts[-1] == file.size else np.append(starts, file.size)


def _records_one_by_one(file: _Bytes, delimiter: str) -> NDArray[np.int64]:
    """Return the offsets of the records by parsing all of them, some microseconds each."""
    position = 0
    starts = [0]

    def lines() -> Iterator[str]:
        nonlocal position
        ends, _ = _lines(file)
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            position = end
            yield file.at(start, end - start).decode("utf-8", "replace")

    try:
        for _ in csv.reader(lines(), delimiter=delimiter):
            starts.append(position)
    except csv.Error as error:
        raise DataError(
            f"{file.path}, row {len(starts) - 1}: not CSV: {error}",
            hints=["is a quote not closed?"],
        ) from None
    return np.array(starts, np.int64)


def read_json(path: Path, label: str) -> Rows:
    """Return the rows of a `.json` file, which has to be a list of objects."""
    file = _Bytes(path)
    if file.size > _MAX_JSON:
        raise DataError(
            f"{path} has {file.size:,} bytes; JSON has to be read whole, up to {_MAX_JSON:,}",
            hints=[f"write one row a line: jq -c '.[]' {path} > {path.stem}.jsonl"],
        )
    raw = file.at(0, file.size)
    if not raw.strip():
        return SequenceRows((), str(path), label)
    try:
        rows = parse_json(_decoded(raw, str(path), is_first=True), str(path))
    except DataError as error:
        is_lines = "Extra data" in error.message
        hints = [f"one object a line? then call it {path.stem}.jsonl"] if is_lines else []
        raise DataError(error.message, hints=[*error.hints, *hints]) from None
    if not isinstance(rows, list):
        fields = rows.items() if isinstance(rows, dict) else ()
        lists = [name for name, value in fields if isinstance(value, list)]
        raise DataError(
            f"{path} holds one {type(rows).__name__}; a list of objects is needed",
            hints=[f"take its list out: jq '.{lists[0]}' {path} > rows.json" if lists else None],
        )
    return SequenceRows(rows, str(path), label)
