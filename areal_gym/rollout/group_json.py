"""Converts groups to compact JSON objects and back, exactly.

The run directory's `trajectories/*.jsonl` are for people; this format is for the journal and for
episodes played in other processes, so it must be cheap. Token ids (int32) and log-probabilities
(float64) are base64 of little-endian arrays, which is exact and takes a tenth of the time of
writing digits.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Container, Iterator, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from areal_gym.types import Group, Task, TokenSpan, Trajectory, Turn
from areal_gym.utils.packed_numbers import Floats, Ints


def _names(cls: type, *excluded: str) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls) if field.name not in excluded)


_PLAIN = _names(Trajectory, "task", "spans", "turns")
_SPAN = _names(TokenSpan, "token_ids", "logprobs", "routed_experts", "teacher_top", "images")
_FLOATS = ("logprobs", "teacher_logprobs")
"""Columns of the policy's tokens; either all or none of its spans have them."""
_RECORDS = ("routed_experts", "teacher_top")
"""Arrays of a span's tokens that few spans have."""
_TURN = _names(Turn)
_plain_of, _span_of, _turn_of = attrgetter(*_PLAIN), attrgetter(*_SPAN), attrgetter(*_TURN)


def pack_group(group: Group) -> dict[str, Any]:
    """Return a group as a JSON object for `dump_row`; `unpack_group` is the inverse."""
    return {
        "id": group.id,
        "task": group.task.to_dict(),
        "num_failed": group.num_failed,
        "trajectories": [_pack(trajectory, group.task) for trajectory in group],
    }


def unpack_group(row: Mapping[str, Any]) -> Group:
    """Return the group that was packed."""
    return Group(
        id=row["id"],
        task=Task(**row["task"]),
        num_failed=row["num_failed"],
        trajectories=tuple(_unpack(packed, row["task"]) for packed in row["trajectories"]),
    )


def pack_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Return one trajectory as a JSON object, without its task."""
    return _pack(trajectory, trajectory.task)


def unpack_trajectory(row: Mapping[str, Any], task: Task) -> Trajectory:
    """Return the trajectory that was packed, with its task."""
    return replace(_unpack(row, {"id": task.id, "data": {}}), task=task)


class _Base64(bytes):
    """Marks a text that needs no escaping in JSON, so that its characters are not examined."""

    __slots__ = ()


def dump_row(row: Mapping[str, Any]) -> bytes:
    """Return an object as one line of JSON.

    List items, and the lists of objects in them, are encoded one by one. The encoder holds the
    interpreter's lock during a call: a group of long trajectories in one call would stall the
    event loop.
    """
    return b"".join(_pieces(row))


def _pieces(row: Mapping[str, Any]) -> Iterator[bytes]:
    yield b"{"
    for number, (key, value) in enumerate(row.items()):
        yield b"%b%b:" % (b"," if number else b"", _encoded(key))
        if type(value) is list:
            yield b"["
            for place, item in enumerate(value):
                if place:
                    yield b","
                if type(item) is dict and any(type(part) is _Base64 for part in item.values()):
                    yield from _pieces(item)
                else:
                    yield _encoded(item)
            yield b"]"
        elif type(value) is _Base64:
            yield from (b'"', value, b'"')
        elif type(value) is dict and all(type(name) is str for name in value):
            yield from _pieces(value)
        else:
            yield _encoded(value)
    yield b"}"


def _pack(trajectory: Trajectory, task: Task) -> dict[str, Any]:
    spans = trajectory.spans
    row = dict(zip(_PLAIN, _plain_of(trajectory), strict=True))
    row["turns"] = [_turn_of(turn) for turn in trajectory.turns]
    row["token_ids"] = _Base64(b64encode(Ints.joined(span.token_ids for span in spans).raw))
    sampled = [span for span in spans if span.origin == "policy"]
    for name in _FLOATS:
        columns = [getattr(span, name) for span in sampled]
        if None not in columns:
            row[name] = _Base64(b64encode(Floats.joined(columns).raw))
    row["spans"] = [(len(span), *_span_values(span, row.keys())) for span in spans]
    for name in _RECORDS:
        records = [getattr(span, name) for span in spans]
        if any(records):
            row[name] = [record and record.to_dict() for record in records]
    if any(span.images for span in spans):
        row["images"] = [[image.to_dict() for image in span.images] for span in spans]
    if trajectory.task is not task and trajectory.task != task:
        row["task"] = trajectory.task.to_dict()
    return row


def _unpack(packed: Mapping[str, Any], task: Mapping[str, Any]) -> Trajectory:
    row: dict[str, Any] = {"task": task, **packed}
    # Not strict: journals of older versions have fewer values, of the same first fields.
    row["turns"] = [dict(zip(_TURN, turn, strict=False)) for turn in row["turns"]]
    row["spans"] = list(_spans(row))
    for name in _RECORDS:
        for span, record in zip(row["spans"], row.pop(name, ()), strict=False):
            span[name] = record
    for span, images in zip(row["spans"], row.pop("images", ()), strict=False):
        span["images"] = images
    return Trajectory.from_dict(row)


def _span_values(span: TokenSpan, columns: Container[str]) -> Iterator[Any]:
    """Yield a span's values, with None for those that are in `columns`."""
    for name, value in zip(_SPAN, _span_of(span), strict=True):
        if isinstance(value, Floats):
            is_in_column = name in columns and span.origin == "policy"
            yield None if is_in_column else value.tolist()
        else:
            yield value


def _spans(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the spans of a packed row; removes the columns of token values from the row."""
    ids = Ints.from_text(row.pop("token_ids"))
    columns = {name: Floats.from_text(row.pop(name)) for name in _FLOATS if name in row}
    start, starts = 0, dict.fromkeys(columns, 0)
    for length, *values in row["spans"]:
        span = dict(zip(_SPAN, values, strict=True))
        span["token_ids"] = ids[start : start + length]
        start += length
        for name, column in columns.items():
            if span["origin"] == "policy":
                first, starts[name] = starts[name], starts[name] + length
                span[name] = column[first : starts[name]]
        yield span


def _encoded(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("ascii")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item"):  # numpy's scalars
        return value.item()
    raise TypeError(f"{value!r} is not valid JSON")


_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_plain)
