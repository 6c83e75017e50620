"""Times of day: 17:45 is 5:45 pm."""

from __future__ import annotations

import re
from typing import NamedTuple

_CLOCK = re.compile(
    r"(?P<hour>[01]?\d|2[0-3])(?::(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?)?"
    r"(?: ?(?P<half>[ap])m|(?P<named> noon| midnight))?",
    re.IGNORECASE,
)


class Time(NamedTuple):
    """A time of day as an answer writes it."""

    written: tuple[int, int, int]
    """Hours, minutes, seconds."""
    half: str
    """The half of the day, "a" or "p"; empty when it is left out."""


def are_same_times(a: Time, b: Time) -> bool:
    """Return whether 17:45 is 5:45 pm, or one of the times leaves "pm" out."""
    if a.written == b.written:
        return a.half == b.half or not (a.half and b.half)
    return _hours(a) == _hours(b)


def _hours(time: Time) -> tuple[int, int, int]:
    hour, minute, second = time.written
    return (hour % 12 + (12 if time.half == "p" else 0) if time.half else hour), minute, second


def read_time(text: str) -> Time | None:
    """Return the time in a tidy text with a colon or "am", "pm", "noon"; None for other texts."""
    clock = _CLOCK.fullmatch(text)
    if clock is None or not (clock["minute"] or clock["half"] or clock["named"]):
        return None
    hour, half = int(clock["hour"]), (clock["half"] or "").lower()
    if clock["named"]:
        half = "p" if clock["named"].strip().lower() == "noon" else "a"
    if half and not 1 <= hour <= 12:
        return None
    return Time((hour, int(clock["minute"] or 0), int(clock["second"] or 0)), half)
