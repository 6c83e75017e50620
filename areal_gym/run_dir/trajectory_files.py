"""Read files of trajectories without parsing their tokens.

Most of a line consists of token ids and log-probabilities. They come last (`Trajectory.to_dict`),
so only the part before them is parsed: 10,000 trajectories are listed in half a second, and a
single one is then read by its offset in the file.

The numbers of tokens are base64 of little-endian arrays, {"int32": "..."}, or lists in files of
earlier versions. The readers in this module return lists in both cases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

from areal_gym.errors import DataError, UnknownIdError
from areal_gym.types import readable
from areal_gym.utils.files import open_data
from areal_gym.utils.packed_numbers import from_packed

# A quote inside a JSON string has a backslash before it, so these bytes can only be keys.
# Earlier versions wrote spaces.
_SPANS = (b',"spans":[', b', "spans": [')
_ADVANTAGES = (b',"advantages":', b', "advantages": ')

_PREVIEW = 120
"""The number of characters of the last message that a preview has."""


@dataclass(frozen=True, slots=True)
class Head:
    """The offset of a trajectory in its file, and a summary without its tokens."""

    offset: int
    num_bytes: int  # the length of the whole line
    num_head_bytes: int  # the length of the line up to its tokens
    summary: Mapping[str, Any]  # the row in lists, with `TrajectoryFile.COLUMNS`


class TrajectoryFile:
    """A file in `trajectories/`, with an index of the lines that were read so far.

    Such files are written atomically and never grow. Several threads may read.
    """

    COLUMNS = (
        *("id", "group", "task", "env", "reward", "stop", "turns", "tokens"),
        *("staleness", "forks", "engine_s", "env_s", "error", "preview"),
    )
    """The keys of `Head.summary`: `tokens` is the number of tokens that the policy sampled;
    `staleness` is that of the oldest token, null in evaluations; `preview` is the end of the
    assistant's last message."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = step_of(path)
        self._heads: list[Head] = []
        self._failure: str | None = None
        self._rest = self._index()
        self._lock = Lock()

    def page(self, start: int = 0, limit: int | None = None) -> Sequence[Head]:
        """Return the heads of `limit` trajectories (None: all) from index `start` on.

        Raises:
            DataError: a line is not a trajectory.
        """
        end = None if limit is None else start + limit
        with self._lock:
            if self._failure is not None:
                raise DataError(self._failure)
            num_new = None if end is None else max(0, end - len(self._heads))
            try:
                self._heads += islice(self._rest, num_new)
            except DataError as error:
                self._failure = error.message  # so that later calls do not return half a file
                raise
            return self._heads[start:end]

    def read(self, place: int) -> dict[str, Any]:
        """Read the trajectory with the index `place`, as parsed JSON with lists of numbers.

        Raises:
            UnknownIdError: the file has fewer trajectories.
            DataError: a line is not a trajectory.
        """
        head = self._head(place)
        return self.read_at(head.offset, head.num_bytes, place=place)

    def read_at(self, offset: int, num_bytes: int, *, place: int = 0) -> dict[str, Any]:
        """Read the trajectory whose line is at a known offset, without indexing the file.

        Raises:
            DataError: there is no such line, or it is not a trajectory; the message has `place`.
        """
        with open_data(self.path) as stream:
            stream.seek(max(0, offset - 1))
            raw = stream.read(num_bytes + (offset > 0))
        if (offset > 0 and raw[:1] != b"\n") or not raw.endswith(b"\n"):
            raise DataError(f"{self.path} has no line of {num_bytes} bytes at byte {offset}")
        row = _parsed(raw, self.path, place)
        for span in row.get("spans", ()):
            for name in ("token_ids", "logprobs", "teacher_logprobs"):
                if isinstance(span, dict) and isinstance(span.get(name), dict):
                    span[name] = _numbers(span[name], self.path, place)
        return row

    def read_head(self, place: int) -> dict[str, Any]:
        """Read the trajectory with the index `place`, without `spans`."""
        head = self._head(place)
        return _parsed(self._raw(head, head.num_head_bytes) + b"}", self.path, place)

    def search(self, text: str) -> list[int]:
        """Return the indices of the trajectories that contain `text`, ignoring case."""
        needle = json.dumps(text, ensure_ascii=False)[1:-1].lower()
        places = []
        with open_data(self.path) as stream:
            for place, head in enumerate(self.page()):
                stream.seek(head.offset)
                raw = stream.read(head.num_head_bytes)
                if needle in raw.decode("utf-8", "replace").lower():
                    places.append(place)
        return places

    def _raw(self, head: Head, num_bytes: int) -> bytes:
        with open_data(self.path) as stream:
            stream.seek(head.offset)
            return stream.read(num_bytes)

    def _head(self, place: int) -> Head:
        for head in self.page(place, 1) if place >= 0 else ():
            return head
        raise UnknownIdError(f"{self.path.stem} has no trajectory {place}")

    def _index(self) -> Iterator[Head]:
        offset = 0
        with open_data(self.path) as stream:
            for place, line in enumerate(stream):
                if line.endswith(b"\n"):
                    num_head_bytes = _place_of(_SPANS, line.rfind)
                    if num_head_bytes < 0:
                        message = f"{self.path}, line {place + 1} is not a trajectory: no spans"
                        raise DataError(message)
                    row = _parsed(line[:num_head_bytes] + b"}", self.path, place)
                    try:
                        summary = _summary(row, self.step)
                    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                        raise DataError(
                            f"{self.path}, line {place + 1} is not a trajectory: {error!r}"
                        ) from None
                    yield Head(offset, len(line), num_head_bytes, summary)
                offset += len(line)


class TrainedFile:
    """The advantages and log-probabilities of a step: a file in `trained/`, which may not exist.

    Raises:
        DataError: a line is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._advantages: dict[int, float] = {}
        self._lines: dict[int, list[tuple[int, int]]] = {}
        self._rest = self._index()
        self._lock = Lock()

    def advantage(self, place: int) -> float | None:
        """Return the mean advantage of a trajectory's first branch; `place` is its index."""
        self._index_up_to(place)
        return self._advantages.get(place)

    def read(self, place: int) -> dict[str, list[float | None]] | None:
        """Read `advantages` and `logprobs` of a trajectory's sampled tokens, in order."""
        self._index_up_to(place)
        if place not in self._lines:
            return None
        columns: dict[str, list[float | None]] = {"advantages": [], "logprobs": []}
        with open_data(self.path) as stream:
            for offset, num_bytes in self._lines[place]:
                stream.seek(offset)
                row = _parsed(stream.read(num_bytes), self.path, place)
                for name, values in columns.items():
                    values += _numbers(row[name], self.path, place, decimals=5)
        return columns

    def _index_up_to(self, place: int) -> None:
        """Index lines up to the first one of a later trajectory; trajectories are in order."""
        with self._lock:
            if place + 1 not in self._advantages:
                for other in self._rest:
                    if other > place:
                        break

    def _index(self) -> Iterator[int]:
        if not self.path.exists():
            return
        offset = 0
        with open_data(self.path) as stream:
            for number, line in enumerate(stream):
                num_head_bytes = _place_of(_ADVANTAGES, line.find)
                head = _parsed(line[:num_head_bytes] + b"}", self.path, number)
                place: int = head["trajectory"]
                self._lines.setdefault(place, []).append((offset, len(line)))
                self._advantages.setdefault(place, head["advantage"])
                offset += len(line)
                yield place


def step_of(path: Path) -> int | None:
    """Return the training step of a file of trajectories; None for an evaluation's file."""
    number = path.stem.removeprefix("step-")
    return int(number) if number.isdigit() else None


def _place_of(keys: Sequence[bytes], find: Callable[[bytes], int]) -> int:
    """Return where the first of the keys that a line has begins; -1 if it has none."""
    return next((place for key in keys if (place := find(key)) >= 0), -1)


def _parsed(raw: bytes, path: Path, place: int) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(raw.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {place + 1} is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {place + 1} is not a JSON object")
    return row


def _numbers(value: Any, path: Path, place: int, decimals: int | None = None) -> list[Any]:
    """Return numbers, packed or not, as a list, with None for those that are not finite."""
    try:
        return [
            None
            if number is None or not math.isfinite(number)
            else number
            if decimals is None
            else round(number, decimals)
            for number in from_packed(value)
        ]
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}, line {place + 1}: {error}") from None


def _summary(row: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    versions = row.get("policy_versions") or []
    turns = row["turns"]
    return {
        "id": row["id"],
        "group": row["group_id"],
        "task": row["task"]["id"],
        "env": row["env_id"],
        "reward": row["reward"],
        "stop": row["stop_reason"],
        "turns": len(turns),
        "tokens": row.get("num_policy_tokens"),
        "staleness": None if step is None or not versions else step - 1 - min(versions),
        "forks": row["num_forks"],
        "engine_s": round(sum(turn["engine_s"] for turn in turns), 4),
        "env_s": round(sum(turn["env_s"] for turn in turns), 4),
        "error": row["error"],
        "preview": preview_of(row["messages"]),
    }


def preview_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the end of the assistant's last message, on one line."""
    for message in reversed(messages):
        if message["role"] == "assistant":
            text = readable(message.get("content") or "")
            for call in message.get("tool_calls") or ():
                function = call["function"]
                text += f" {function['name']}({json.dumps(function['arguments'])})"
            words = " ".join(text[-400:].split())
            return words if len(words) <= _PREVIEW else "…" + words[-_PREVIEW:]
    return ""
