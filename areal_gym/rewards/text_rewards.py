"""Built-in rewards that only read the text. No completion of the policy makes them raise."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from areal_gym.errors import EnvError, UsageError, choices

_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ColumnReward:
    """A reward that compares the completion with a column of the row; `column` is its name."""

    never_blocks: ClassVar[bool] = True

    def __init__(self, column: str) -> None:
        if not isinstance(column, str) or not column:
            raise UsageError(f"answer = {column!r}: the name of a column is needed")
        self.required_columns = (column,)

    def gold(self, row: Mapping[str, Any]) -> Any:
        """Return the row's value of the column; raise EnvError if it has none."""
        (column,) = self.required_columns
        if row.get(column) is None:
            raise EnvError(f"the row has no value in the column {column!r}")
        return row[column]

    def golds(self, row: Mapping[str, Any]) -> list[str]:
        """Return the right answers as texts: the value, or the items of a list."""
        gold = self.gold(row)
        return [str(answer) for answer in (gold if isinstance(gold, list | tuple) else [gold])]


class Exact(ColumnReward):
    """1 if the completion equals the answer, else 0; surrounding white space is ignored.

    Args:
        answer: the column with the right answer, or with a list of right answers.
        ignore_case: whether upper and lower case are treated as equal.
        ignore_punctuation: whether ASCII punctuation is removed from both.
    """

    def __init__(
        self, *, answer: str = "answer", ignore_case: bool = False, ignore_punctuation: bool = False
    ) -> None:
        super().__init__(answer)
        self._ignore_case = ignore_case
        self._ignore_punctuation = ignore_punctuation

    def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return 1.0 or 0.0."""
        text = self._normal(completion)
        return float(any(text == self._normal(answer) for answer in self.golds(row)))

    def _normal(self, text: str) -> str:
        if self._ignore_punctuation:
            text = text.translate(_PUNCTUATION)
        if self._ignore_case:
            text = text.casefold()
        return " ".join(text.split())


class Length:
    """1 for a length between two limits; outside them, the reward falls linearly to 0.

    Args:
        low: the shortest length with full reward.
        high: the longest length with full reward; None for no limit.
        unit: "words" or "characters".
        slope: the number of units beyond a limit at which the reward is 0 [as many as the limit,
            at least 1].
    """

    never_blocks: ClassVar[bool] = True

    def __init__(
        self,
        *,
        low: int = 0,
        high: int | None = None,
        unit: str = "words",
        slope: float | None = None,
    ) -> None:
        if unit not in ("words", "characters"):
            raise UsageError(f"unit = {unit!r}", hints=choices(unit, ("words", "characters")))
        if low < 0 or (high is not None and high < low) or (low == 0 and high is None):
            raise UsageError(
                f"low = {low!r}, high = {high!r}: a length from low to high is rewarded",
                hints=["give one of them at least: high=200"],
            )
        if slope is not None and slope <= 0:
            raise UsageError(f"slope = {slope!r}: a positive number of units")
        self._low, self._high, self._unit, self._slope = low, high, unit, slope

    def __call__(self, completion: str) -> float:
        """Return a number from 0 to 1."""
        length = len(completion.split()) if self._unit == "words" else len(completion)
        if length < self._low:
            beyond, limit = self._low - length, self._low
        elif self._high is not None and length > self._high:
            beyond, limit = length - self._high, self._high
        else:
            return 1.0
        return max(0.0, 1.0 - beyond / (self._slope or max(1, limit)))


class Format:
    """1 if the completion consists of these tags in this order, each once, else 0.

    `tags=("think", "answer")` requires `<think>...</think><answer>...</answer>` with text inside
    each pair and nothing but white space around them.

    Args:
        tags: the names of the tags.
    """

    never_blocks: ClassVar[bool] = True

    def __init__(self, *, tags: Sequence[str] = ("think", "answer")) -> None:
        if isinstance(tags, str) or not tags or len(set(tags)) < len(tags):
            raise UsageError(f"tags = {tags!r}: a list of different names is needed")
        self._tags = tuple(tags)

    def __call__(self, completion: str) -> float:
        """Return 1.0 or 0.0."""
        rest = completion
        for tag in self._tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if completion.count(opening) != 1 or completion.count(closing) != 1:
                return 0.0
            before, _, rest = rest.partition(opening)
            inside, end, rest = rest.partition(closing)
            if before.strip() or not end or not inside.strip():
                return 0.0
        return float(not rest.strip())
