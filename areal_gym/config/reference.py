"""Writes docs/settings.md: `python -m areal_gym.config.reference > docs/settings.md`."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from areal_gym.config.run_config import RunConfig
from areal_gym.config.sections import PluginConfig
from areal_gym.config.settings_model import bounds, section_of

_HEAD = """# Settings

`areal-gym train -c FILE key=value ...`: FILE is YAML with these keys as a tree, and `key=value`
sets one of them (values are YAML, too). `--dry-run` prints the resolved settings: the algorithm,
the objective and `engine.model=starter` have defaults of their own for some of them.

This page is written by `python -m areal_gym.config.reference > docs/settings.md`; a test compares.
"""


def settings_page() -> str:
    """Return the page as Markdown: a table for each section, in the order of `RunConfig`."""
    parts = [_HEAD]
    for title, description, rows in _sections(RunConfig, ""):
        parts.append(f"## {f'`{title}`' if title else 'A run'}\n")
        if description:
            parts.append(description + "\n")
        parts.append("| setting | values | default | |\n|---|---|---|---|")
        parts += [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in rows]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _sections(
    model: type[BaseModel], prefix: str
) -> Iterator[tuple[str, str, list[tuple[str, str, str, str]]]]:
    fields = model.model_fields.items()
    rows = [
        (prefix + name, _kind(info), _default(info), _cell(info.description or ""))
        for name, info in fields
        if section_of(info) is None
    ]
    yield prefix.rstrip("."), _cell(model.__doc__ or ""), rows
    for name, info in fields:
        section = section_of(info) or _optional_section(info.annotation)
        if section is not None:
            yield from _sections(section, f"{prefix}{name}.")


def _optional_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section of a field that may be null."""
    for part in get_args(annotation):
        is_model = isinstance(part, type) and issubclass(part, BaseModel)
        if is_model and not issubclass(part, PluginConfig):
            return part  # type: ignore[no-any-return]
    return None


def _kind(info: FieldInfo) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    limits = (f"{signs[name]} {limit:g}" for name, limit in bounds(info))
    return ", ".join([_type(info.annotation), *limits])


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " \\| ".join(_type(part) for part in arguments)
    if annotation is type(None):
        return "null"
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is not None or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "`{id, kwargs}`" if issubclass(annotation, PluginConfig) else "a section, below"
    words = {str: "text", bool: "true \\| false", int: "integer", float: "number", Path: "path"}
    return words.get(annotation, "any")


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, tuple):
        return "`[]`" if not value else f"`{[_plain(item) for item in value]}`"
    return f"`{_plain(value)}`"


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return re.sub(r"docs/(\S+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    print(settings_page(), end="")
