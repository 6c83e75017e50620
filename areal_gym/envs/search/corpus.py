"""Passages, files of them, and a small index in memory: BM25 without the extra `search`."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from areal_gym.errors import DataError
from areal_gym.tasks.opening import read_rows
from areal_gym.tasks.row_checks import text_field
from areal_gym.tasks.rows import SourceRow
from areal_gym.utils.files import path_hints

_MAX_QUERY, _MAX_TERMS = 2_000, 64
_K1, _B = 1.2, 0.75
"""The constants of BM25, as in Lucene and tantivy."""


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
    """Yield the passages of a file (see `read_rows`): rows with `id`, `text` and maybe `title`.

    Rows with `contents` instead have their title on its first line, as Search-R1 writes them.
    A missing file, a broken row or an id a second time is a DataError.
    """
    ids: set[str] = set()
    for row in read_rows(path):
        passage = _passage_of(row)
        if passage.id in ids:
            raise DataError(f"{row.where}: a second passage with the id {passage.id!r}")
        ids.add(passage.id)
        yield passage


def _passage_of(row: SourceRow) -> Passage:
    if "contents" in row.data and "text" not in row.data:
        title, _, text = text_field(row, "contents").partition("\n")
        return Passage(text_field(row, "id"), title.strip('" '), text)
    title = row.data.get("title") or ""
    if not isinstance(title, str):
        raise DataError(f"{row.where}: field 'title' is {title!r}; a text is needed")
    return Passage(text_field(row, "id"), title, text_field(row, "text"))


def corpus_hash(path: Path) -> str:
    """Return 16 hex digits of a hash of the file's bytes; raise DataError if it cannot be read."""
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


class MemoryIndex:
    """An inverted index with the scores of Robertson and Zaragoza (2009), equation 3.15."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._passages = list(passages)
        self._by_id = {passage.id: passage for passage in self._passages}
        counts = [Counter(words(p.searched)) for p in self._passages]
        lengths = [count.total() for count in counts]
        mean_length = sum(lengths) / max(1, len(lengths)) or 1.0
        frequencies = Counter(term for count in counts for term in count)
        self._postings: dict[str, list[tuple[int, float]]] = {}
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            norm = _K1 * (1 - _B + _B * length / mean_length)
            for term, times in count.items():
                rarity = math.log(
                    1 + (len(counts) - frequencies[term] + 0.5) / (frequencies[term] + 0.5)
                )
                score = rarity * times * (_K1 + 1) / (times + norm)
                self._postings.setdefault(term, []).append((number, score))

    def search(self, query: str, k: int) -> list[Hit]:
        """Return the `k` best passages that share a word with the query, best first."""
        scores: dict[int, float] = {}
        for term in set(terms(query)):
            for number, score in self._postings.get(term, ()):
                scores[number] = scores.get(number, 0.0) + score
        # Sums of floats in the order of a set would differ between processes in the last bit.
        best = heapq.nsmallest(k, scores.items(), key=lambda item: (-round(item[1], 9), item[0]))
        return [Hit(self._passages[number], score) for number, score in best]

    def get(self, id: str) -> Passage | None:
        """Return the passage of that id; None if there is none."""
        return self._by_id.get(id)
