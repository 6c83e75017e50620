"""Files that crashes and full disks leave readable: whole or not at all, or line by line."""

from __future__ import annotations

import contextlib
import difflib
import errno
import itertools
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from areal_gym.errors import DataError, TrainError

__all__ = [
    "append_text",
    "cut_torn_line",
    "open_data",
    "path_hints",
    "read_bytes",
    "read_json",
    "read_lines",
    "readable_disk_errors",
    "remove",
    "to_json",
    "write_atomic",
]

_MOST_NEIGHBOURS = 1000
"""Names of a directory that a mistyped one is compared with."""
MOST_BYTES = 2**28
"""Of a file that is read whole, and of a line of others: more is no record of a run."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def path_hints(path: Path) -> list[str]:
    """For an error about a path: the nearest name, else how much of it is not there.

    Empty where there is something.
    """
    if path.exists():
        return []
    if not path.parent.exists():
        return path_hints(path.parent)
    neighbours: list[str] = []
    with contextlib.suppress(OSError):
        neighbours = [p.name for p in itertools.islice(path.parent.iterdir(), _MOST_NEIGHBOURS)]
    close = difflib.get_close_matches(path.name, neighbours, cutoff=0.8)
    if close:
        return [f"did you mean {' or '.join(repr(str(path.with_name(name))) for name in close)}?"]
    return [f"there is no {path.absolute()}"]


def write_atomic(file: Path, data: str | bytes) -> None:
    """Make `file` hold `data`, whatever happens meanwhile: the old content, or all of the new.

    Raises:
        TrainError: the disk is full.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    with readable_disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                stream.write(raw)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(file)
            _sync_directory(file.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def readable_disk_errors(path: Path) -> Iterator[None]:
    """Turn what a full or read-only disk raises inside into a TrainError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise TrainError(
                f"the disk is full: cannot write {path} ({error.strerror})",
                hints=[
                    "free some space, or choose another disk with --out",
                    "runs keep their space in checkpoints/ and trajectories/; old ones can go",
                    "then continue: the same command with --resume",
                ],
            ) from error
        if error.errno == errno.ENOENT:
            raise TrainError(
                f"cannot write {path} ({error.strerror})",
                hints=["has somebody deleted or moved its directory meanwhile?"],
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise TrainError(
                f"cannot write {path} ({error.strerror})",
                hints=["choose another directory with --out"],
            ) from error
        raise


def remove(path: Path) -> None:
    """Delete a file or a directory; a link goes, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def append_text(file: Path, text: str) -> None:
    """Add to the end of a file: all of it, or nothing.

    Raises:
        TrainError: the disk is full.
    """
    with readable_disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab", buffering=0) as stream:
            size = stream.tell()
            raw = text.encode("utf-8", "surrogatepass")
            try:
                if stream.write(raw) != len(raw):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                # Half a line would be glued to the next one.
                with contextlib.suppress(OSError):
                    stream.truncate(size)
                raise


def open_data(file: Path) -> BinaryIO:
    """Opens a file for reading, if it is a plain one: a pipe would never end, nor would a device.

    Raises:
        DataError: it is something else than a file.
        OSError: it cannot be opened.
    """
    stream = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise DataError(f"{file} is not a plain file")


def read_bytes(file: Path, *, most: int = MOST_BYTES) -> bytes:
    """Returns what a plain file holds.

    Raises:
        DataError: it is larger than `most` bytes, or is not a plain file.
        OSError: it cannot be read.
    """
    with open_data(file) as stream:
        raw = stream.read(most + 1)
    if len(raw) > most:
        raise DataError(f"{file} is larger than {most / 1e6:,.0f} MB")
    return raw


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        DataError: the file holds something else, or is not a plain file.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(read_bytes(file).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{file} holds a {type(found).__name__} where an object belongs")
    return found


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """JSON lines, one object each; a last one that a crash has torn is left out.

    Raises:
        DataError: a line is no JSON object, or is longer than `MOST_BYTES`.
    """
    if not file.exists():
        return
    with open_data(file) as stream:
        for number in itertools.count(1):
            line = stream.readline(MOST_BYTES)
            if not line.endswith(b"\n"):
                if len(line) == MOST_BYTES:
                    raise DataError(f"{file}, line {number} is longer than {MOST_BYTES} bytes")
                return
            try:
                row = json.loads(line.decode("utf-8", "surrogatepass"))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}, line {number} is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{file}, line {number} is no JSON object")
            yield row


def cut_torn_line(file: Path) -> None:
    """Cut off a last line that a crash has torn."""
    if file.exists():
        raw = file.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if whole != raw:
            write_atomic(file, whole)


def _sync_directory(path: Path) -> None:
    # The rename itself survives a power cut only when the directory is on the disk too.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON for readers in any language: what is no number is null."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        # JSON has no NaN; readers in other languages stumble over Python's.
        return json.dumps(_finite(value), indent=indent, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    # numpy's scalars; anything else is for people to read.
    return value.item() if hasattr(value, "item") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
