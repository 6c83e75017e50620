"""Task sources: the contract, and endless seeded generators.

    draw(rng, split)   -> a random task: what training asks for
    at(index, split)   -> the i-th of a fixed sequence of distinct tasks: what evaluation asks for

Which split a task belongs to is a hash of its *key* (the canonical form of what is asked, not its
wording), so that no test problem occurs in training under another phrasing.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from areal_gym.errors import UsageError, choices
from areal_gym.types import Task, content_hash

SPLITS = ("train", "test")
TEST_SHARE = 0.1
"""Share of the keys that is held out."""

_MAX_INDEX = 1_000_000
"""Limit of a fixed sequence, which is kept in memory; draw tasks to get more."""
_MAX_REPEATS = 20_000
"""Drafts in a row without a new key after which a generator counts as exhausted."""


class TaskSource(Protocol):
    """Provides the tasks of an environment."""

    def num_tasks(self, split: str) -> int | None:
        """Return the number of distinct tasks in the split; None for a generator."""
        return None

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Return a random task of the split."""

    def at(self, index: int, split: str) -> Task:
        """Return the task of that index: distinct for distinct indexes, equal in every process."""


def split_of(key: str, share: float = TEST_SHARE) -> str:
    """Return "test" for a share of all keys, a tenth by default, "train" for the others."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return "test" if int.from_bytes(digest[:4]) < share * 2**32 else "train"


def choose_task(source: TaskSource, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
    """Return the task that `options` name, or a random one of the split; else raise UsageError."""
    split, index = asked_for(options)
    return source.draw(rng, split) if index is None else source.at(index, split)


def asked_for(
    options: Mapping[str, Any], splits: Collection[str] = SPLITS
) -> tuple[str, int | None]:
    """Return the split and the index in the options (None: any task), else raise UsageError."""
    split = options.get("split", "train")
    if split not in splits:
        raise UsageError(f"no split {split!r}", hints=choices(str(split), splits))
    index = options.get("index")
    if index is None:
        return split, None
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or index < 0:
        raise UsageError(f"a task's index is a whole number from 0 on, not {index!r}")
    return split, int(index)


def given_task(task: Any) -> Task:
    """Return the task of `options["task"]`, a `Task` or its `to_dict()`, else raise UsageError."""
    if isinstance(task, Task):
        return task
    try:
        return Task(**task)
    except TypeError as error:
        message = f"options['task'] is not a task: {error}"
        raise UsageError(message, hints=["give what Task.to_dict() returns"]) from None


# ---- generated ----------------------------------------------------------------------------------


class Draft(NamedTuple):
    """A problem before it is assigned to a split."""

    key: str
    """Decides the split; equal for problems that differ only in their wording."""
    data: Mapping[str, Any]
    split: str | None = None
    """The split, if the data itself names one."""


class GeneratedTasks(TaskSource):
    """An endless source of tasks drawn from `make_draft`; fixed sequences are seeded with `name`.

    `make_draft` draws one random problem, from the given generator and nowhere else.
    """

    def __init__(self, name: str, make_draft: Callable[[random.Random], Draft]) -> None:
        self.name = name
        self._make_draft = make_draft
        # The fixed sequence of each split, as far as it has been requested.
        self._rngs = {split: random.Random(f"{name}/{split}") for split in SPLITS}
        self._tasks: dict[str, list[Task]] = {split: [] for split in SPLITS}
        self._keys: dict[str, set[str]] = {split: set() for split in SPLITS}
        self._lock = threading.Lock()

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Return a random task of the split; equal states of `rng` give equal tasks."""
        # The standard library's generator draws single numbers ten times faster than numpy's.
        fast_rng = random.Random(int(rng.integers(2**63)))
        for _ in range(_MAX_REPEATS):
            draft = self._make_draft(fast_rng)
            if split_of(draft.key) == split:
                return _task_of(draft, split)
        raise self._exhausted(split, 0)

    def at(self, index: int, split: str) -> Task:
        """Return the task of that index, each of another key; raise UsageError after the last."""
        if index >= _MAX_INDEX:
            raise UsageError(f"index {index} is too far; {self.name} counts up to {_MAX_INDEX}")
        rng, tasks, keys = self._rngs[split], self._tasks[split], self._keys[split]
        with self._lock:
            num_repeats = 0
            while len(tasks) <= index:
                draft = self._make_draft(rng)
                if draft.key not in keys and split_of(draft.key) == split:
                    num_repeats = 0
                    keys.add(draft.key)
                    tasks.append(_task_of(draft, split))
                elif (num_repeats := num_repeats + 1) > _MAX_REPEATS:
                    raise self._exhausted(split, len(tasks))
            return tasks[index]

    def _exhausted(self, split: str, num_tasks: int) -> UsageError:
        return UsageError(f"{self.name} has only {num_tasks} distinct tasks in split {split!r}")


def _task_of(draft: Draft, split: str) -> Task:
    return Task(id=f"{split}/{content_hash(draft.data)}", data=draft.data, split=split)


class SampledTasks(TaskSource):
    """The tasks of an environment that chooses them itself: `sample_task` as a source."""

    def __init__(
        self,
        sample: Callable[[np.random.Generator, Mapping[str, Any]], Task],
        count: Callable[[str], int | None],
        notes: Sequence[str] = (),
    ) -> None:
        self.notes = notes
        """What is to be said about the splits before a run."""
        self._sample = sample
        self._count = count

    def num_tasks(self, split: str) -> int | None:
        """Return the environment's number of tasks."""
        return self._count(split)

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Return a task that the environment draws."""
        return self._sample(rng, {"split": split})

    def at(self, index: int, split: str) -> Task:
        """Return the environment's task of that index."""
        return self._sample(np.random.default_rng(0), {"split": split, "index": index})


# ---- seeds ---------------------------------------------------------------------------------------


class SeedTasks(TaskSource):
    """Tasks that consist of a `seed`, for environments of other libraries; even seeds train."""

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Draw a random seed of the split."""
        return self.at(int(rng.integers(2**30)), split)

    def at(self, index: int, split: str) -> Task:
        """Return the seed of that index."""
        seed = 2 * index + (split == "test")
        return Task(id=f"{split}/{seed}", data={"seed": seed}, split=split)
