"""Where tasks come from: seeded generators without end, and JSONL files.

    draw(rng, split)   -> a random task: what training asks for
    at(index, split)   -> the i-th of a fixed sequence of distinct tasks: what evaluation asks for

Which split a task belongs to is a hash of its *key* (the canonical form of what is asked, not its
wording), so that no test problem occurs in training under another phrasing.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from areal_gym.errors import DataError, NothingToDoError, UsageError, did_you_mean
from areal_gym.types import Task, content_hash

__all__ = ["Draft", "FileTasks", "GeneratedTasks", "TaskSource", "choose_task", "split_of"]

SPLITS = ("train", "test")
TEST_SHARE = 0.1
"""Share of the keys that is held out."""

_MAX_INDEX = 1_000_000
"""A fixed sequence is kept in memory; whoever wants more tasks draws them."""
_MAX_REPEATS = 20_000
"""Drafts in a row without a new key after which a generator counts as exhausted."""


class TaskSource(Protocol):
    """Gives the tasks of an environment."""

    def num_tasks(self, split: str) -> int | None:
        """How many distinct tasks the split has; None for a generator."""
        ...

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """A random task of the split."""
        ...

    def at(self, index: int, split: str) -> Task:
        """The task of that index: distinct for distinct indexes, equal in every process."""
        ...


def split_of(key: str) -> str:
    """ "test" for a tenth of all keys, "train" for the others."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return "test" if int.from_bytes(digest[:4]) < TEST_SHARE * 2**32 else "train"


def choose_task(source: TaskSource, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
    """The task that `reset(options={"split": ..., "index": ...})` asks for; both are optional.

    Raises:
        UsageError: there is no such split or index.
    """
    split = options.get("split", "train")
    if split not in SPLITS:
        raise UsageError(
            f"no split {split!r}",
            hints=[did_you_mean(str(split), SPLITS) or f"there is: {', '.join(SPLITS)}"],
        )
    index = options.get("index")
    if index is None:
        return source.draw(rng, split)
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or index < 0:
        raise UsageError(f"a task's index is a whole number from 0 on, not {index!r}")
    return source.at(int(index), split)


# ---- generated ----------------------------------------------------------------------------------


class Draft(NamedTuple):
    """A generated problem before it is known to which split it belongs."""

    key: str
    """What the split goes by; equal for problems that are the same but for their wording."""
    data: Mapping[str, Any]


@dataclass
class _Sequence:
    """The fixed sequence of one split, as far as anybody has asked for it."""

    rng: random.Random
    tasks: list[Task] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)


class GeneratedTasks:
    """Tasks drawn from `make_draft`, without end.

    Args:
        name: names the generator and its settings; fixed sequences are seeded with it.
        make_draft: one random problem. It draws from the given generator and nowhere else.
    """

    def __init__(self, name: str, make_draft: Callable[[random.Random], Draft]) -> None:
        self.name = name
        self._make_draft = make_draft
        self._sequences = {s: _Sequence(random.Random(f"{name}/{s}")) for s in SPLITS}
        self._lock = threading.Lock()

    def num_tasks(self, split: str) -> int | None:
        """None: there is always another one."""
        return None

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """A random task of the split; equal states of `rng` give equal tasks."""
        # The standard library's generator draws single numbers ten times faster than numpy's.
        fast_rng = random.Random(int(rng.integers(2**63)))
        for _ in range(_MAX_REPEATS):
            draft = self._make_draft(fast_rng)
            if split_of(draft.key) == split:
                return _task_of(draft, split)
        raise self._exhausted(split, 0)

    def at(self, index: int, split: str) -> Task:
        """The task of that index; no two of them have the same key.

        Raises:
            UsageError: there are not that many.
        """
        if index >= _MAX_INDEX:
            raise UsageError(f"index {index} is too far; {self.name} counts up to {_MAX_INDEX}")
        sequence = self._sequences[split]
        with self._lock:
            num_repeats = 0
            while len(sequence.tasks) <= index:
                draft = self._make_draft(sequence.rng)
                if draft.key not in sequence.keys and split_of(draft.key) == split:
                    num_repeats = 0
                    sequence.keys.add(draft.key)
                    sequence.tasks.append(_task_of(draft, split))
                else:
                    num_repeats += 1
                    if num_repeats > _MAX_REPEATS:
                        raise self._exhausted(split, len(sequence.tasks))
            return sequence.tasks[index]

    def _exhausted(self, split: str, num_tasks: int) -> UsageError:
        return UsageError(f"{self.name} has only {num_tasks} distinct tasks in split {split!r}")


def _task_of(draft: Draft, split: str) -> Task:
    return Task(id=f"{split}/{content_hash(draft.data)}", data=draft.data, split=split)


# ---- files --------------------------------------------------------------------------------------


class FileTasks:
    """Tasks of a JSONL file (or `.jsonl.gz`): one object with a question and an answer a line.

    Without `test_path`, a tenth of the questions is held out by a hash of their text. With it, the
    test split is that file, and questions that occur in it are left out of the training split.

    Raises:
        DataError: a file is missing, or a row is broken; the message names file and line.
        NothingToDoError: a file has no row.
    """

    def __init__(
        self,
        path: Path,
        *,
        test_path: Path | None = None,
        question_field: str = "question",
        answer_field: str = "answer",
    ) -> None:
        self.path = path
        rows = list(_read_rows(path, question_field, answer_field))
        if test_path is None:
            by_split = {
                split: [row for row in rows if split_of(row.key) == split] for split in SPLITS
            }
        else:
            test_rows = list(_read_rows(test_path, question_field, answer_field))
            held_out = {row.key for row in test_rows}
            by_split = {
                "train": [row for row in rows if row.key not in held_out],
                "test": test_rows,
            }
        self._tasks = {
            split: [Task(id=row.id, data=row.data, split=split) for row in _distinct(rows)]
            for split, rows in by_split.items()
        }

    def num_tasks(self, split: str) -> int | None:
        """How many distinct questions the split has."""
        return len(self._tasks[split])

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """A random task of the split."""
        tasks = self._of(split)
        return tasks[int(rng.integers(len(tasks)))]

    def at(self, index: int, split: str) -> Task:
        """The task of that index, in the order of the file.

        Raises:
            UsageError: the split has not that many.
        """
        tasks = self._of(split)
        if index >= len(tasks):
            raise UsageError(
                f"index {index} of split {split!r}: {self.path} has {len(tasks)} such tasks"
            )
        return tasks[index]

    def _of(self, split: str) -> list[Task]:
        tasks = self._tasks[split]
        if not tasks:
            raise NothingToDoError(
                f"{self.path} has no task in split {split!r}",
                hints=["give a larger file, or a test file of its own: test_path=FILE"],
            )
        return tasks


class _Row(NamedTuple):
    key: str
    id: str
    data: dict[str, str]


def _distinct(rows: list[_Row]) -> list[_Row]:
    return list({row.key: row for row in reversed(rows)}.values())[::-1]


def _read_rows(path: Path, question_field: str, answer_field: str) -> Iterator[_Row]:
    stem = path.name.split(".")[0]
    is_empty = True
    for line_number, line in _read_lines(path):
        is_empty = False
        where = f"{path}, line {line_number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: no JSON: {error}") from None
        except RecursionError:
            raise DataError(f"{where}: nested too deeply") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: a row is an object, not {type(row).__name__}")
        question = _text_field(row, question_field, where)
        answer = _text_field(row, answer_field, where)
        data = {"question": question, "answer": answer}
        # The hash makes the id follow the content: an edited row is another task.
        yield _Row(
            key=" ".join(question.split()).casefold(),
            id=f"{stem}/{line_number}-{content_hash(data)[:8]}",
            data=data,
        )
    if is_empty:
        raise NothingToDoError(f"{path} has no rows")


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line_number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if line_number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(f"{path}, line {line_number}: no UTF-8: {error}") from None
                if text.strip():
                    yield line_number, text
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"cannot read {path}: {reason}") from None


def _text_field(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        near = did_you_mean(name, row) or f"it has: {', '.join(row) or 'nothing'}"
        raise DataError(f"{where}: no field {name!r}", hints=[near])
    value = row[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: field {name!r} is {value!r}; a text or a number is needed")
    return value
