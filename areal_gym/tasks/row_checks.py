"""Conditions on rows, and their fields: a row that does not fit is a DataError that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_gym.errors import DataError, UsageError, choices
from areal_gym.tasks.rows import SourceRow


def row_filter(where: Mapping[str, Any] | None) -> Callable[[SourceRow], bool]:
    """Return a filter of rows: for each field a value, a list of values, or a range.

    Other conditions are a UsageError.

    Example: `row_filter({"subject": "Algebra", "type": ["a", "b"], "level": {"max": 3}})`
    """
    conditions = dict(where or {})
    for name, wanted in conditions.items():
        if isinstance(wanted, Mapping) and (not wanted or not {"min", "max"} >= set(wanted)):
            raise UsageError(
                f"where {name} = {dict(wanted)!r}", hints=["a range has a min, a max, or both"]
            )

    def is_meant(row: SourceRow) -> bool:
        for name in conditions:
            if name not in row.data:
                raise DataError(
                    f"{row.where}: no field {name!r} to filter by", hints=choices(name, row.data)
                )
        return all(_fits(row.data[name], wanted) for name, wanted in conditions.items())

    return is_meant


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return bool(wanted.get("min", value) <= value <= wanted.get("max", value))
    return value in wanted if isinstance(wanted, list | tuple) else bool(value == wanted)


def text_field(row: SourceRow, name: str) -> str:
    """Return the row's field of that name: a number or text, and not blank; else DataError."""
    if name not in row.data:
        raise DataError(f"{row.where}: no field {name!r}", hints=choices(name, row.data))
    value = row.data[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{row.where}: field {name!r} is {value!r}; a text or a number is needed")
    return value


def texts_field(row: SourceRow, name: str) -> list[str]:
    """Return the row's field of that name: a list of texts that are not blank, else DataError."""
    values = row.data[name]
    is_list = isinstance(values, list) and bool(values)
    if not is_list or not all(isinstance(value, str) and value.strip() for value in values):
        raise DataError(f"{row.where}: field {name!r} is {values!r}; a list of texts is needed")
    texts: list[str] = values
    return texts
