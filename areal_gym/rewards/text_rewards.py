"""Built-in rewards that read the text only. None of them raises, whatever the policy writes."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, ClassVar

from areal_gym.errors import EnvError, UsageError

_PUNCTUATION = str.maketrans("", "", string.punctuation)


class _ColumnReward:
    """A reward that compares with a column of the row, whose name is an argument."""

    never_blocks: ClassVar[bool] = True

    def __init__(self, column: str) -> None:
        if not isinstance(column, str) or not column:
            raise UsageError(f"answer = {column!r}: the name of a column is needed")
        self.required_columns = (column,)

    def gold(self, row: Mapping[str, Any]) -> Any:
        """Return the row's value, which is not of the policy's making; raise EnvError."""
        (column,) = self.required_columns
        if row.get(column) is None:
            raise EnvError(f"the row has no value in the column {column!r}")
        return row[column]


class Exact(_ColumnReward):
    """1 if the completion is the answer, else 0; spaces around them do not count.

    Args:
        answer: the column of the right answer, or of a list of right answers.
        ignore_case: whether capital letters count as small ones.
        ignore_punctuation: whether ASCII punctuation is left out of both.
    """

    def __init__(
        self, *, answer: str = "answer", ignore_case: bool = False, ignore_punctuation: bool = False
    ) -> None:
        super().__init__(answer)
        self._ignore_case = ignore_case
        self._ignore_punctuation = ignore_punctuation

    def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return 1.0 or 0.0."""
        gold = self.gold(row)
        answers = gold if isinstance(gold, list | tuple) else [gold]
        text = self._normal(completion)
        return float(any(text == self._normal(str(answer)) for answer in answers))

    def _normal(self, text: str) -> str:
        if self._ignore_punctuation:
            text = text.translate(_PUNCTUATION)
        if self._ignore_case:
            text = text.casefold()
        return " ".join(text.split())
