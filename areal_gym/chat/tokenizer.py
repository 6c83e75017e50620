"""Tokenizers: text to ids and back, with nothing added."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from areal_gym.errors import ConfigError


class Tokenizer(Protocol):
    """The part of a tokenizer that rendering needs."""

    @property
    def control_tokens(self) -> Sequence[str]:
        """Texts that `encode` turns into one id of their own which no other text gives."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with nothing added; control tokens in it become their ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included."""
        ...


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
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.control_tokens = [token.content for token in added if token.special]
        control_ids = {
            id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.num_plain_tokens = 1 + max((id for id in ids if id not in control_ids), default=-1)
        """One more than the largest id of a token that is not a control token."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with nothing added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text
