"""Tasks made from data sets that are too large for memory; a row is read when it is drawn."""

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
"""The number of successive unusable rows (broken or held out) after which an error is raised."""


class LargeRowTasks(TaskSource):
    """Tasks made from rows that are never all in memory.

    Without `test`, up to 1,000 rows are held out, always the same ones of the same data. No
    held-out question is trained on: if a training row has the same key, the next row is taken.
    Equal rows of the training split are separate tasks, because rows are not compared. Drawing a
    broken row raises DataError, or takes the next row with `skip_broken`.
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
        """Notes about the splits, which are shown before a run."""
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
        """Return the task with this index, in the order of the rows."""
        num_tasks = self.num_tasks(split) or 0
        if index >= num_tasks:
            raise UsageError(
                f"index {index} of split {split!r}: {self.name} has {num_tasks} such tasks"
            )
        if split == "test":
            return self._heldout[index]
        for offset in range(min(num_tasks, _MOST_SKIPPED)):
            number = (index + offset) % num_tasks
            row = self._train[number if self._indices is None else int(self._indices[number])]
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
