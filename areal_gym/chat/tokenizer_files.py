"""Reads the parts of Hugging Face's checkpoint layout that rendering needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_gym.errors import ConfigError
from areal_gym.utils.files import read_bytes

_MOST_BYTES = 2**26
"""Limit for a tokenizer's settings or a template; the largest in use have a hundredth of it."""


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in `file`, or an empty one if the file does not exist.

    Raises:
        ConfigError: it cannot be read.
    """
    if not file.is_file():
        return {}
    try:
        tree = json.loads(read_bytes(file, most=_MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    return tree if isinstance(tree, dict) else {}


def read_chat_template(directory: Path, config: Mapping[str, Any]) -> str:
    """Return the template's text, from its own file or from the tokenizer's configuration.

    Raises:
        ConfigError: there is none.
    """
    file = directory / "chat_template.jinja"
    template: Any = config.get("chat_template")
    if file.is_file():
        try:
            template = read_bytes(file, most=_MOST_BYTES).decode("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from None
    if isinstance(template, list):  # several named ones
        named = [entry for entry in template if isinstance(entry, dict)]
        template = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"no chat template in {directory}",
            hints=[
                "base models often have none; take the instruction-tuned model of the family,",
                "or put a chat_template.jinja beside tokenizer.json",
            ],
        )
    return template


def read_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that a template may use, such as `bos_token`, from the tokenizer's
    configuration."""
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }


def read_stop_ids(directory: Path) -> list[int]:
    """Return the ids at which the model's authors end generation."""
    eos = read_json(directory / "generation_config.json").get("eos_token_id")
    if eos is None:
        return []
    return list(eos) if isinstance(eos, list) else [eos]
