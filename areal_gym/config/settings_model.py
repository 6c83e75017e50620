"""What settings are made of: frozen pydantic models, and trees of plain values that merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Unknown keys are errors; what follows an attribute is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    """Put `tree` on top of `into`, key by key."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree, by dotted key; lists of mappings have numbers for keys."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from flat(item, f"{prefix}.{place}")
    else:
        yield prefix, value
