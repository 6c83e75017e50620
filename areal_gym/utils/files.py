"""Write files that stay readable after crashes and on full disks, and read them: JSON, YAML."""

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
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from areal_gym.errors import DataError, TrainError
from areal_gym.utils.packed_numbers import PackedNumbers

MAX_JSON_DEPTH = 300
"""The maximum depth of untrusted JSON; recursive readers can handle 1,000."""
_MOST_NEIGHBOURS = 1000  # the number of names in a directory compared with a mistyped name
MOST_BYTES = 2**28
"""The maximum size of a file that is read as a whole, and of a line; no record is larger."""
MOST_VALUES = 2**18
"""The maximum number of values in a YAML file; a run has some hundred settings."""
_MOST_MERGED = 16  # the maximum number of aliases in a YAML file with merges, which multiply them
_MOST_YAML = 2**24
_LINE = (
    orjson.OPT_APPEND_NEWLINE | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ELOOP}


def path_hints(path: Path) -> list[str]:
    """Return hints about a path that does not exist: a similar name, or the missing part."""
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


def write_atomic(
    file: Path, data: str | bytes | Iterable[str | bytes], *, is_synced: bool = True
) -> None:
    """Replace the content of `file` atomically: it has either the old or the new content.

    Args:
        file: the path; its directory is created.
        data: the content; the texts of an iterable are written one by one, to save memory.
        is_synced: whether to wait until the content is on the disk; otherwise a power cut may
            lose it.

    Raises:
        TrainError: the disk is full or not writable.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    texts: Iterable[str | bytes] = [data] if isinstance(data, str | bytes) else data
    with readable_disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                for text in texts:
                    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
                    stream.write(raw)
                stream.flush()
                if is_synced:
                    os.fsync(stream.fileno())
            temporary.replace(file)
            if is_synced:
                # The rename survives a power cut only if the directory is on the disk, too.
                descriptor = os.open(file.parent, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def readable_disk_errors(path: Path) -> Iterator[None]:
    """Turn the OSError of a full or read-only disk into a TrainError that names `path`."""
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
        hint = "was its directory deleted or moved?" if error.errno == errno.ENOENT else ""
        if error.errno in _FORBIDDEN:
            hint = "choose another directory with --out"
        if not hint:
            raise
        raise TrainError(f"cannot write {path} ({error.strerror})", hints=[hint]) from error


def remove(path: Path) -> None:
    """Delete a file, a directory, or a link (but not its target)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def append_text(file: Path, text: str) -> None:
    """Append text to a file, see `append_bytes`."""
    append_bytes(file, text.encode("utf-8", "surrogatepass"))


def append_bytes(file: Path, raw: bytes) -> None:
    """Append all of the bytes to a file, or nothing.

    Raises:
        TrainError: the disk is full or not writable.
        DataError: the file is a symbolic link.
    """
    with readable_disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with _open_for_appending(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            try:
                if stream.write(raw) != len(raw):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                # Otherwise the next line would be appended to half a line.
                with contextlib.suppress(OSError):
                    stream.truncate(size)
                raise


def open_data(file: Path) -> BinaryIO:
    """Open a file for reading; raise DataError for a pipe or a device, which might never end."""
    stream = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise DataError(f"{file} is not a plain file")


def read_bytes(file: Path, *, most: int = MOST_BYTES) -> bytes:
    """Return the content of a plain file; raise DataError if it has more than `most` bytes."""
    with open_data(file) as stream:
        raw = stream.read(most + 1)
    if len(raw) > most:
        raise DataError(f"{file} is larger than {most / 1e6:,.0f} MB")
    return raw


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise DataError if it has no object."""
    try:
        content = json.loads(read_bytes(file).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{file} holds a {type(content).__name__}, not an object")
    return content


def _open_for_appending(file: Path) -> FileIO:
    """Open a file, but not by a symbolic link; devices such as /dev/null are allowed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    if not file.is_char_device():
        flags |= os.O_NOFOLLOW
    try:
        return FileIO(os.open(file, flags, 0o666), "a")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(
                f"{file} is a link, and is not written through",
                hints=["put the file itself there: cp --dereference; or remove the link"],
            ) from None
        raise


def read_yaml(file: Path) -> Any:
    """Return the plain values of a YAML file; raise DataError for other or too many values."""
    import yaml

    # With libyaml, a list of many runs takes a tenth of the time.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = read_bytes(file, most=_MOST_YAML)
        _require_bounded_yaml(text, loader)
        content = yaml.load(text, loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid YAML: {error}") from None
    # Each use of an alias counts, because recursive readers visit it each time.
    waiting, number = [content], 0
    while waiting:
        value = waiting.pop()
        number += 1
        if number > MOST_VALUES:
            raise DataError(f"{file} holds more than {MOST_VALUES:,} values")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set):
            waiting += value
    return content


def _require_bounded_yaml(text: bytes, loader: Any) -> None:
    """Raise ValueError for nesting that would crash the loader, or too many merges."""
    import yaml

    depth, num_aliases, has_merge = 0, 0, False
    for event in yaml.parse(text, loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        num_aliases += isinstance(event, yaml.AliasEvent)
        has_merge |= isinstance(event, yaml.ScalarEvent) and event.value == "<<"
        if depth > MAX_JSON_DEPTH:
            raise ValueError("it is nested too deeply")
        if has_merge and num_aliases > _MOST_MERGED:
            raise ValueError("it merges too many aliases")


def read_lines(file: Path, *, skips_torn_end: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file, without an incomplete last line.

    With `skips_torn_end`, complete lines at the end that are not JSON are left out, too: a crash
    of the machine can cause them.

    Raises:
        DataError: a line is not a JSON object, or is longer than `MOST_BYTES`.
    """
    if not file.exists():
        return
    torn: DataError | None = None
    with open_data(file) as stream:
        for number in itertools.count(1):
            line = stream.readline(MOST_BYTES)
            if not line.endswith(b"\n"):
                if len(line) == MOST_BYTES:
                    raise DataError(f"{file}, line {number} is longer than {MOST_BYTES} bytes")
                return
            row = _row(line)
            if isinstance(row, str):
                torn = torn or DataError(f"{file}, line {number} is not valid JSON: {row}")
            if torn is not None and (isinstance(row, dict) or not skips_torn_end):
                raise torn
            if isinstance(row, dict):
                yield row


def _row(line: bytes) -> dict[str, Any] | str:
    """Return the object in a line, or the problem with it as a text."""
    try:
        row = json.loads(line.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        return str(error)
    return row if isinstance(row, dict) else "it is not an object"


def cut_torn_end(file: Path) -> str | None:
    """Cut off what a crash left at a file's end: an incomplete line, and lines that are not JSON.

    The end is appended to FILE.torn, so nothing is lost. Returns a description of the repair, or
    None if there was nothing to repair.
    """
    if not file.exists():
        return None
    whole = offset = 0
    with open_data(file) as stream:
        while line := stream.readline(MOST_BYTES):
            offset += len(line)
            if line.endswith(b"\n") and isinstance(_row(line), dict):
                whole = offset
        if whole == offset:
            return None
        stream.seek(whole)
        torn = stream.read(MOST_BYTES)
        stream.seek(0)
        good = stream.read(whole)
    append_bytes(file.with_name(file.name + ".torn"), torn)
    write_atomic(file, good)
    return (
        f"{file.name} ended in {offset - whole} bytes that a crash has torn: they are cut off, and "
        f"kept in {file.name}.torn"
    )


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return standard JSON, with null in place of NaN and infinity."""
    dumps = partial(json.dumps, indent=indent, ensure_ascii=False, default=_plain)
    try:
        return dumps(value, allow_nan=False)
    except ValueError:
        return dumps(_finite(value))


def to_json_line(value: Any) -> bytes:
    """Return standard JSON as `to_json` does, without spaces, as a line of UTF-8.

    Texts are not escaped character by character, which makes base64 cost a tenth. What orjson
    refuses (keys that are no texts, numbers above 64 bits, lone surrogates) is left to `json`.
    """
    try:
        return orjson.dumps(value, default=_plain, option=_LINE)
    except TypeError:
        return (to_json(value) + "\n").encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, PackedNumbers):
        return _finite(value.tolist())
    # A scalar of numpy becomes a number; any other object becomes text.
    return value.item() if hasattr(value, "item") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def is_nested_deeper(value: Any, depth: int) -> bool:
    """Return whether objects and lists in a value are nested more than `depth` levels deep."""
    level = [value]
    for _ in range(depth + 1):
        dicts = (item.values() for item in level if isinstance(item, dict))
        lists = (item for item in level if isinstance(item, list))
        level = list(itertools.chain.from_iterable(itertools.chain(dicts, lists)))
        if not level:
            return False
    return True
