"""Reads facts about a checkpoint's model from its JSON files, without loading it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_gym.utils.files import read_json


def vocab_size_of(policy: Path) -> int | None:
    """Return the vocabulary size; None if there is no `config.json` or it does not say."""
    config = _read(policy / "config.json")
    # Multimodal models nest the settings of their text part.
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return None if size is None else int(size)


def num_layers_of(policy: Path) -> int | None:
    """Return the number of decoder layers; None if the checkpoint does not say."""
    config = _read(policy / "config.json")
    number = config.get("text_config", config).get("num_hidden_layers")
    return None if number is None else int(number)


def eos_token_ids(policy: Path) -> list[int]:
    """Return the tokens that end the model's text, from the same two files that SGLang reads."""
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        eos = _read(policy / name).get("eos_token_id")
        if eos is not None:
            ids += eos if isinstance(eos, list) else [eos]
    return ids


def _read(file: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError):
        return read_json(file)
    return {}
