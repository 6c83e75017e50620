"""Tasks made from more rows than one wants in memory: each is read when it is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from areal_gym.errors import DataError, NothingToDoError, UsageError
from areal_gym.tasks.base import Draft, TaskSource, asked_for
from areal_gym.tasks.row_tasks import NO_TASK_HINTS, task_of_row, with_skip_hint
from areal_gym.tasks.rows import Rows, SourceRow
from areal_gym.types import Task

MAX_HELD_OUT = 1_000
_MOST_SKIPPED = 1_000
"""Rows in a row whose question is held out, or that are broken, after which it is said."""


class LargeRowTasks(TaskSource):
    """Tasks of rows that are never all in memory.

    Without `test`, up to 1,000 rows are held out: always the same ones of the same data. No
    held-out question is trained on: a training row with the same key is passed over for the next.
    Repeated rows of the training split are separate tasks, because they are not compared. A
    broken row is a DataError when it is drawn, or with `skip_broken` passed over.
    """

    def __init__(
        self,
        name: str,
        train: Rows,
        make_draft: Callable[[SourceRow], Draft],
        *,
        test: Rows | None = None,
        heldout: float = 0.1,
        skip_broken: bool = False,
    ) -> None:
        self.name = name
        self.notes: Sequence[str] = ()
        """What is to be said about the splits before a run."""
        self.num_skipped = 0
        self._make_draft = make_draft
        self._skip_broken = skip_broken
        self._train = train
        self._indices: np.ndarray | None = None
        if test is None:
            chosen = random.Random(0).sample(
                range(len(train)), min(MAX_HELD_OUT, int(heldout * len(train)))
            )
            chosen.sort()
            self._indices = np.delete(np.arange(len(train)), chosen)
            drafts = [self._draft(train[index]) for index in chosen]
            rows = [train[index] for index in chosen]
        else:
            rows = list(test)
            drafts = [self._draft(row) for row in rows]
        distinct = {
            draft.key: task_of_row(row, draft, "test")
            for row, draft in zip(rows, drafts, strict=True)
            if draft is not None
        }
        self._heldout_keys = set(distinct)
        self._heldout = list(distinct.values())

    def num_tasks(self, split: str) -> int | None:
        """Return the number of tasks in the split."""
        if asked_for({"split": split})[0] == "test":
            return len(self._heldout)
        return len(self._train) if self._indices is None else len(self._indices)

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Return a random task of the split."""
        num_tasks = self.num_tasks(split)
        if not num_tasks:
            raise NothingToDoError(
                f"{self.name} has no task in split {split!r}", hints=NO_TASK_HINTS
            )
        return self.at(int(rng.integers(num_tasks)), split)

    def at(self, index: int, split: str) -> Task:
        """Return the task of that index, in the order of the rows."""
        num_tasks = self.num_tasks(split) or 0
        if index >= num_tasks:
            raise UsageError(
                f"index {index} of split {split!r}: {self.name} has {num_tasks} such tasks"
            )
        if split == "test":
            return self._heldout[index]
        for offset in range(min(num_tasks, _MOST_SKIPPED)):
            place = (index + offset) % num_tasks
            row = self._train[place if self._indices is None else int(self._indices[place])]
            draft = self._draft(row)
            if draft is not None and draft.key not in self._heldout_keys:
                return task_of_row(row, draft, "train")
        raise DataError(
            f"{row.where}: none of the {_MOST_SKIPPED:,} rows up to here can be trained on: "
            "each is broken, or its question is held out",
            hints=["has the test split the same rows?"],
        )

    def _draft(self, row: SourceRow) -> Draft | None:
        try:
            return self._make_draft(row)
        except DataError as error:
            if not self._skip_broken:
                raise with_skip_hint(error, self.name) from None
            self.num_skipped += 1
            return None
