"""Converts and refuses field values as the benchmark's models do."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def as_text(value: Any) -> str:
    """Return a text; refuse a number."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def as_choice(value: Any, choices: Collection[str]) -> str:
    """Return one of the allowed texts."""
    if value not in choices:
        raise ValueError(f"{value!r} is none of {', '.join(choices)}")
    return str(value)


def as_int(value: Any) -> int:
    """Return a whole number, given as an int, a float or a text."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        return int(value.strip())
    raise ValueError(f"{value!r} is no whole number")


def as_float(value: Any) -> float:
    """Return a number, given as a number or a text."""
    if isinstance(value, int | float | str):
        number = float(value)
        if math.isfinite(number):
            return number
    raise ValueError(f"{value!r} is no number")
