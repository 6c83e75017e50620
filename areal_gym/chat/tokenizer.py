"""Tokenizers, which convert text to ids and back without adding any, and the files beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from areal_gym.errors import ConfigError
from areal_gym.utils.files import read_bytes

_MOST_BYTES = 2**26
"""The maximum size of a tokenizer's settings or a template, a hundred times those in use."""


class Tokenizer(Protocol):
    """The part of a tokenizer that rendering needs."""

    @property
    def control_tokens(self) -> Sequence[str]:
        """The texts that `encode` turns into a single id, which no other text becomes."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with nothing added; control tokens in it become their ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included."""


class FastTokenizer:
    """A `tokenizers.Tokenizer` with the interface that rendering needs.

    Raises:
        ConfigError: there is no readable `tokenizer.json` in the directory.
    """

    def __init__(self, directory: Path) -> None:
        import tokenizers

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"no tokenizer.json in {directory}",
                hints=["save the tokenizer there: AutoTokenizer(...).save_pretrained(DIRECTORY)"],
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises bare Exception
            raise ConfigError(f"cannot read {file}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder().items()
        control = {id: token.content for id, token in added if token.special}
        self.control_tokens = list(control.values())
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.num_plain_tokens = 1 + max((id for id in ids if id not in control), default=-1)
        """One more than the largest id of a token that is not a control token."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in `file`, or an empty one; raise ConfigError if it is unreadable."""
    if not file.is_file():
        return {}
    try:
        tree = json.loads(read_bytes(file, most=_MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    return tree if isinstance(tree, dict) else {}


def read_chat_template(directory: Path, config: Mapping[str, Any]) -> str:
    """Return the text of the chat template, from its own file or the tokenizer's configuration.

    Raises:
        ConfigError: there is no template, or it cannot be read.
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
    """Return the special tokens by the names that templates use, such as `bos_token`.

    `config` is the tokenizer's configuration.
    """
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
