"""Reads the tools' descriptions from a file, for runs with the benchmark's exact prompt.

A file changes descriptions only: what the tools are called and what they take is compared.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from areal_gym.envs.tau2.domain_state import ToolInfo, Tools, load_tools
from areal_gym.errors import DataError

_WAYS = (
    "it should hold, as JSON: domain -> assistant, user -> tool -> openai_schema",
    "with neither tool_texts=FILE nor tau2/tool_schemas.json in the data, our own words are used",
)


def find_tool_texts(given: str | None, data: Path) -> Path | None:
    """Return the given file, else `tau2/tool_schemas.json` of the data, else None."""
    if given:
        return Path(given).expanduser().resolve()
    file = data / "tau2" / "tool_schemas.json"
    return file if file.exists() else None


@cache
def read_tools(file: Path, domain: str) -> Tools:
    """Return the domain's tools with the descriptions of a file; read once per process.

    Raises:
        DataError: it cannot be read, or a tool is missing or differs in more than descriptions.
    """
    try:
        rows = json.loads(file.read_bytes())[domain]
        return {
            side: {
                name: _described(info, rows[side][name]["openai_schema"])
                for name, info in tools.items()
            }
            for side, tools in load_tools(domain).items()
        }
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", hints=_WAYS) from None
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} lacks something of tau2/{domain}: {error}", hints=_WAYS) from None
    except ValueError as error:  # also JSONDecodeError, UnicodeDecodeError
        raise DataError(f"{file}: {error}", hints=_WAYS) from None


def without_descriptions(schema: Any) -> Any:
    """Return a JSON schema without the descriptions for its reader."""
    if isinstance(schema, dict):
        return {
            key: without_descriptions(value)
            for key, value in schema.items()
            if not (key == "description" and isinstance(value, str))
        }
    return [without_descriptions(value) for value in schema] if isinstance(schema, list) else schema


def _described(info: ToolInfo, schema: dict[str, Any]) -> ToolInfo:
    name = info.tool.name
    if without_descriptions(schema) != without_descriptions(info.schema):
        raise ValueError(f"its {name!r} takes other arguments than ours")
    return ToolInfo.of(schema, info.kind, info.mutates)
