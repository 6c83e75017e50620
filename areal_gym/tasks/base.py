"""Task sources: the interface, and endless seeded generators.

    draw(rng, split)   -> a random task, for training
    at(index, split)   -> the i-th of a fixed sequence of distinct tasks, for evaluation

A hash of a task's *key* decides its split. The key is a canonical form of the problem, independent
of its wording, so no test problem occurs in training under another phrasing.
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
"""The share of keys that is held out."""

_MAX_INDEX = 1_000_000
"""The maximum length of a fixed sequence, which is kept in memory; `draw` has no limit."""
_MAX_REPEATS = 20_000
"""The number of successive drafts without a new key after which a generator is exhausted."""


class TaskSource(Protocol):
    """Provides the tasks of an environment."""

    def num_tasks(self, split: str) -> int | None:
        """Return the number of distinct tasks in the split; None for a generator."""
        return None

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Return a random task of the split."""

    def at(self, index: int, split: str) -> Task:
        """Return the task with this index: different for each index, the same in every process."""


def split_of(key: str, share: float = TEST_SHARE) -> str:
    """Return "test" for a share of all keys, by default a tenth, and "train" for the others."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return "test" if int.from_bytes(digest[:4]) < share * 2**32 else "train"


def choose_task(source: TaskSource, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
    """Return the task with the index in `options`, or else a random one of the split.

    Raises:
        UsageError: the split does not exist, or the index is not valid.
    """
    split, index = asked_for(options)
    return source.draw(rng, split) if index is None else source.at(index, split)


def asked_for(
    options: Mapping[str, Any], splits: Collection[str] = SPLITS
) -> tuple[str, int | None]:
    """Return the split and the index in the options; the index is None if any task will do.

    Raises:
        UsageError: the split does not exist, or the index is not a whole number from 0 on.
    """
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
    """Return the task in `options["task"]`, which is a `Task` or the result of its `to_dict()`.

    Raises:
        UsageError: it is neither.
    """
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
    """The key that decides the split; it is equal for problems that differ only in wording."""
    data: Mapping[str, Any]
    split: str | None = None
    """The split, if the data itself names one."""


class GeneratedTasks(TaskSource):
    """An endless source of random tasks.

    Args:
        name: seeds the fixed sequence of each split.
        make_draft: draws a random problem from the given generator only.
    """

    def __init__(self, name: str, make_draft: Callable[[random.Random], Draft]) -> None:
        self.name = name
        self._make_draft = make_draft
        # The fixed sequence of each split, up to the highest index requested so far.
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
        """Return the task with this index, all with different keys.

        Raises:
            UsageError: the generator has no more distinct tasks, or the index is too large.
        """
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
    """A source for environments that choose their tasks themselves, by `sample_task`."""

    def __init__(
        self,
        sample: Callable[[np.random.Generator, Mapping[str, Any]], Task],
        count: Callable[[str], int | None],
        notes: Sequence[str] = (),
    ) -> None:
        self.notes = notes
        """Notes about the splits, which are shown before a run."""
        self._sample = sample
        self._count = count

    def num_tasks(self, split: str) -> int | None:
        """Return the environment's number of tasks."""
        return self._count(split)

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Return a task that the environment draws."""
        return self._sample(rng, {"split": split})

    def at(self, index: int, split: str) -> Task:
        """Return the environment's task with this index."""
        return self._sample(np.random.default_rng(0), {"split": split, "index": index})


# ---- seeds ---------------------------------------------------------------------------------------


class SeedTasks(TaskSource):
    """Tasks that consist of a `seed`, for environments of other libraries.

    Even seeds are in the split "train", odd seeds in "test".
    """

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Draw a random seed of the split."""
        return self.at(int(rng.integers(2**30)), split)

    def at(self, index: int, split: str) -> Task:
        """Return the task of the seed with this index."""
        seed = 2 * index + (split == "test")
        return Task(id=f"{split}/{seed}", data={"seed": seed}, split=split)
