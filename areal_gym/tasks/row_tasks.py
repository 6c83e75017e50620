"""Tasks made from rows of data that fit into memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from areal_gym.errors import DataError, NothingToDoError, UsageError
from areal_gym.tasks.base import SPLITS, TEST_SHARE, Draft, asked_for, split_of
from areal_gym.tasks.rows import SourceRow
from areal_gym.types import Task, content_hash, thaw

NO_TASK_HINTS = ("give more rows, or rows for both: tasks={data: FILE, test: FILE}",)


class RowTasks:
    """Tasks made from the rows of files or data sets, in their order.

    Args:
        name: the data's name in messages.
        train: the rows of the training split, or without `test` of both splits.
        make_draft: makes a task from a row.
        test: the rows of the test split; training tasks with the same keys are left out.
        skip_broken: whether rows of which no task can be made are left out, counted in
            `num_skipped`.
        is_meant: tests whether a row is used; others are left out, counted in `num_filtered`.
        heldout: without `test`, the share of rows that is held out, by a hash of their keys; rows
            may also name their split.
        few_rows: nothing is held out if there are fewer distinct rows than this.

    Raises:
        DataError: no task can be made of a row; the message has file and line.
        NothingToDoError: there are no rows.
    """

    def __init__(
        self,
        name: str,
        train: Iterable[SourceRow],
        make_draft: Callable[[SourceRow], Draft],
        *,
        test: Iterable[SourceRow] | None = None,
        skip_broken: bool = False,
        is_meant: Callable[[SourceRow], bool] | None = None,
        heldout: float = TEST_SHARE,
        few_rows: int = 0,
    ) -> None:
        self.name = name
        self.notes: Sequence[str] = ()
        """Notes about the splits, which are shown before a run."""
        self._heldout = heldout
        self.num_skipped = 0
        self.num_filtered = 0
        self.num_contaminated = 0
        """The number of training rows left out because the test split has the same question."""
        self._is_meant = is_meant
        self._make_draft = make_draft
        self._skip_broken = skip_broken
        rows = self._read(train, None if test is None else "train")
        if test is None and len({key for key, _ in rows}) < few_rows:
            rows = [(key, replace(task, split="train")) for key, task in rows]
        if test is not None:
            held_out = self._read(test, "test")
            keys = {key for key, _ in held_out}
            kept = [row for row in rows if row[0] not in keys]
            self.num_contaminated = len(rows) - len(kept)
            rows = kept + held_out
        if not rows:
            filtered = f" left after {self.num_filtered} were filtered" if self.num_filtered else ""
            raise NothingToDoError(f"{name} has no rows{filtered}")
        self._tasks: dict[str, list[Task]] = {}
        for split in SPLITS:
            distinct = {key: task for key, task in reversed(rows) if task.split == split}
            self._tasks[split] = list(distinct.values())[::-1]

    def num_tasks(self, split: str) -> int | None:
        """Return the number of distinct tasks; raise UsageError if there is no such split."""
        return len(self._tasks[asked_for({"split": split})[0]])

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Return a random task of the split."""
        tasks = self._of(split)
        return tasks[int(rng.integers(len(tasks)))]

    def at(self, index: int, split: str) -> Task:
        """Return the task with this index, in the file's order, or raise UsageError."""
        tasks = self._of(split)
        if index >= len(tasks):
            raise UsageError(
                f"index {index} of split {split!r}: {self.name} has {len(tasks)} such tasks"
            )
        return tasks[index]

    def _read(self, rows: Iterable[SourceRow], split: str | None) -> list[tuple[str, Task]]:
        """Return the key and task of each row; without `split`, the row or its key decides it."""
        keyed = []
        for row in rows:
            if self._is_meant is not None and not self._is_meant(row):
                self.num_filtered += 1
                continue
            try:
                draft = self._make_draft(row)
            except DataError as error:
                if not self._skip_broken:
                    raise with_skip_hint(error, self.name) from None
                self.num_skipped += 1
                continue
            if draft.split not in (None, *SPLITS):
                raise DataError(f"{row.where}: split {draft.split!r} is not one of {SPLITS}")
            row_split = split or draft.split or split_of(draft.key, self._heldout)
            keyed.append((draft.key, task_of_row(row, draft, row_split)))
        return keyed

    def _of(self, split: str) -> list[Task]:
        tasks = self._tasks[split]
        if not tasks:
            raise NothingToDoError(
                f"{self.name} has no task in split {split!r}", hints=NO_TASK_HINTS
            )
        return tasks


def with_skip_hint(error: DataError, name: str) -> DataError:
    """Return the error about a row, with a hint about the setting that skips such rows."""
    setting = f"env.kwargs.tasks={{data: {name}, skip_broken: true}}"
    return DataError(error.message, hints=[*error.hints, f"leave such rows out: '{setting}'"])


def task_of_row(row: SourceRow, draft: Draft, split: str) -> Task:
    """Return the task of a row; its id depends on the content, so an edited row is another task."""
    id = f"{row.label}-{content_hash(draft.data)[:8]}"
    return Task(id=id, data=draft.data, split=split)


def question_of(task: Task) -> str:
    """Return the question of a task: its field `question` or `prompt`, else all fields as text."""
    for name in ("question", "prompt", "messages"):
        value = task.data.get(name)
        if isinstance(value, tuple) and value and isinstance(value[-1], Mapping):
            value = value[-1].get("content")  # a dialogue: its last message
        if isinstance(value, str):
            return value
    return json.dumps(thaw(task.data), sort_keys=True, ensure_ascii=False, default=str)


def key_of_text(text: str) -> str:
    """Return the key of a question in plain text, which ignores white space and case."""
    return " ".join(text.split()).casefold()
