"""How the benchmark's models take a field's value: what they convert, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def as_text(value: Any) -> str:
    """Text only; a number is refused."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def as_choice(value: Any, choices: Collection[str]) -> str:
    """One of some texts."""
    if value not in choices:
        raise ValueError(f"{value!r} is none of {', '.join(choices)}")
    return str(value)


def as_int(value: Any) -> int:
    """A whole number, also as a float or a text."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        return int(value.strip())
    raise ValueError(f"{value!r} is no whole number")


def as_float(value: Any) -> float:
    """A number, also as a text."""
    if isinstance(value, int | float | str):
        number = float(value)
        if math.isfinite(number):
            return number
    raise ValueError(f"{value!r} is no number")
