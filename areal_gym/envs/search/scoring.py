"""Scores of short answers (exact match and F1, as SQuAD and HotpotQA count them) and citations."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection, Iterable

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CITATION = re.compile(r"\[([^\[\]\s]{1,80})\]")
_VERDICTS = {"yes", "no", "noanswer"}
"""Answers without a partial F1, since half a verdict is worthless (HotpotQA)."""


def normalize(answer: str) -> str:
    """Return the answer in lower case, without punctuation, articles and extra space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Iterable[str]) -> float:
    """Return 1 if the answer is one of the right ones, else 0."""
    given = normalize(answer)
    return float(bool(given) and any(given == normalize(gold) for gold in golds))


def f1_score(answer: str, golds: Iterable[str]) -> float:
    """Return the best harmonic mean of precision and recall over words."""
    return max((_f1(normalize(answer), normalize(gold)) for gold in golds), default=0.0)


def _f1(given: str, gold: str) -> float:
    if given != gold and (given in _VERDICTS or gold in _VERDICTS):
        return 0.0
    given_words, gold_words = given.split(), gold.split()
    num_shared = sum((Counter(given_words) & Counter(gold_words)).values())
    return _harmonic_mean(num_shared, len(given_words), len(gold_words))


def cited_ids(text: str) -> list[str]:
    """Return the texts in square brackets, in order, each once: `[w00009]`."""
    return list(dict.fromkeys(_CITATION.findall(text)))


def citation_score(cited: Collection[str], support: Collection[str]) -> float:
    """Return the F1 of the cited passages against those that support the answer."""
    wanted = set(support)
    return _harmonic_mean(len(wanted & set(cited)), len(set(cited)), len(wanted))


def _harmonic_mean(num_shared: int, num_given: int, num_wanted: int) -> float:
    return 2 * num_shared / (num_given + num_wanted) if num_shared else 0.0
