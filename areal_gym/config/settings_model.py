"""The base class of all sections of settings, and functions for trees of plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo


class Settings(BaseModel):
    """A frozen section of settings. Unknown keys are errors; docstrings are the descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Urls = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""A tuple of URLs; a single URL may be given as a string."""


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a setting that is a section; None for a plain value."""
    model = info.annotation
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


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
    """Return the trees merged key by key; later trees override earlier ones."""
    tree: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping):
                earlier = tree.get(key)
                tree[key] = merged(earlier if isinstance(earlier, Mapping) else {}, value)
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
