"""Passages, and files of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from areal_gym.envs.data_files import SourceRow, read_file, text_field
from areal_gym.errors import DataError
from areal_gym.utils.files import path_hints

_MAX_QUERY, _MAX_TERMS = 2_000, 64


class Passage(NamedTuple):
    """A piece of text that can be found and cited."""

    id: str
    title: str
    text: str

    @property
    def searched(self) -> str:
        """The searched text. The title counts twice: the subject of a passage comes first."""
        return f"{self.title} {self.title} {self.text}"


class Hit(NamedTuple):
    """A passage with its score."""

    passage: Passage
    score: float


def read_corpus(path: Path) -> Iterator[Passage]:
    """Yield the passages of a file (see `read_file`): rows with `id`, `text` and maybe `title`.

    Rows with `contents` instead have their title on its first line, as Search-R1 writes them.

    Raises:
        DataError: the file is missing or has a broken row, or an id a second time.
    """
    ids: set[str] = set()
    for row in read_file(path):
        passage = passage_of(row)
        if passage.id in ids:
            raise DataError(f"{row.where}: a second passage with the id {passage.id!r}")
        ids.add(passage.id)
        yield passage


def passage_of(row: SourceRow) -> Passage:
    """Return the passage that a row holds.

    Raises:
        DataError: none.
    """
    if "contents" in row.data and "text" not in row.data:
        title, _, text = text_field(row, "contents").partition("\n")
        return Passage(text_field(row, "id"), title.strip('" '), text)
    title = row.data.get("title") or ""
    if not isinstance(title, str):
        raise DataError(f"{row.where}: field 'title' is {title!r}; a text is needed")
    return Passage(text_field(row, "id"), title, text_field(row, "text"))


def corpus_hash(path: Path) -> str:
    """Return 16 hex digits of a hash of the file's bytes.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hints=path_hints(path)) from None


def words(text: str) -> list[str]:
    """Return the runs of letters and digits, in lower case."""
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def terms(query: str) -> list[str]:
    """Return the words of a query that are searched for: at most 64."""
    return words(query[:_MAX_QUERY])[:_MAX_TERMS]
