"""What settings are made of: frozen pydantic models, and trees of plain values that merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["Settings", "merge"]


class Settings(BaseModel):
    """Unknown keys are errors; what follows an attribute is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    """Put `tree` on top of `into`, key by key."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value
