"""BM25 over passages in memory: for the small built-in corpus, without the extra `search`."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable

from areal_gym.envs.search.corpus import Hit, Passage, terms, words

_K1, _B = 1.2, 0.75
"""The values of Lucene and tantivy."""


class MemoryIndex:
    """An inverted index with the scores of Robertson and Zaragoza (2009), equation 3.15.

    Args:
        passages: all of them.
    """

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

    def __len__(self) -> int:
        return len(self._passages)

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
