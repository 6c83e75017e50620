"""The base of all settings, and the trees of plain values that they are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo


class Settings(BaseModel):
    """A section of settings: frozen, unknown keys are errors, attribute docstrings describe."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Urls = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""URLs; one alone may be a text."""


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a setting that is a section of its own; None for a plain value."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def bounds(info: FieldInfo) -> Iterator[tuple[str, Any]]:
    """Yield the bounds of a number: ("gt", 0), ("le", 1), ..."""
    for limit in info.metadata:
        for name in ("gt", "ge", "lt", "le"):
            if getattr(limit, name, None) is not None:
                yield name, getattr(limit, name)


def setting_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield all settings of a model by dotted key, in order."""
    for name, info in model.model_fields.items():
        section = section_of(info)
        if section is None:
            yield prefix + name, info
        else:
            yield from setting_fields(section, f"{prefix}{name}.")


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trees as one, key by key; later ones override earlier ones."""
    tree: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping):
                below = tree.get(key)
                tree[key] = merged(below if isinstance(below, Mapping) else {}, value)
            else:
                tree[key] = value
    return tree


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree by dotted key; list items that are mappings get numbers."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from flat(item, f"{prefix}.{index}")
    else:
        yield prefix, value
