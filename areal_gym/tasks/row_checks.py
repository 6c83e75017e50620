"""Filter rows and read their fields; errors about a row name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_gym.errors import DataError, UsageError, choices
from areal_gym.tasks.rows import SourceRow


def row_filter(where: Mapping[str, Any] | None) -> Callable[[SourceRow], bool]:
    """Return a function that tests whether a row fulfils the conditions in `where`.

    A condition of a field is a value, a list of values, or a range.

    Example: `row_filter({"subject": "Algebra", "type": ["a", "b"], "level": {"max": 3}})`

    Raises:
        UsageError: a range is not valid.
    """
    conditions = dict(where or {})
    for name, condition in conditions.items():
        is_range = isinstance(condition, Mapping)
        if is_range and (not condition or not {"min", "max"} >= set(condition)):
            raise UsageError(
                f"where {name} = {dict(condition)!r}", hints=["a range has a min, a max, or both"]
            )

    def is_selected(row: SourceRow) -> bool:
        for name in conditions:
            if name not in row.data:
                raise DataError(
                    f"{row.where}: no field {name!r} to filter by", hints=choices(name, row.data)
                )
        return all(_fulfils(row.data[name], condition) for name, condition in conditions.items())

    return is_selected


def _fulfils(value: Any, condition: Any) -> bool:
    if isinstance(condition, Mapping):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return bool(condition.get("min", value) <= value <= condition.get("max", value))
    return value in condition if isinstance(condition, list | tuple) else bool(value == condition)


def text_field(row: SourceRow, name: str) -> str:
    """Return a field as text; raise DataError unless it is a number or a text with content."""
    if name not in row.data:
        raise DataError(f"{row.where}: no field {name!r}", hints=choices(name, row.data))
    value = row.data[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{row.where}: field {name!r} is {value!r}; a text or a number is needed")
    return value


def texts_field(row: SourceRow, name: str) -> list[str]:
    """Return a field with a list of texts; raise DataError if it is not one, or one is blank."""
    values = row.data[name]
    is_list = isinstance(values, list) and bool(values)
    if not is_list or not all(isinstance(value, str) and value.strip() for value in values):
        raise DataError(f"{row.where}: field {name!r} is {values!r}; a list of texts is needed")
    texts: list[str] = values
    return texts
