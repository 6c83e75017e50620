"""Finds questions of the test set that leak into the training set, equal or nearly equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from areal_gym.envs.base import TextEnv
from areal_gym.tasks import TaskSource, key_of_text, question_of

_SHINGLE = 8
"""Number of consecutive words that two different questions rarely share."""
_MIN_SHINGLES = 8
_MAX_TASKS = 20_000
_NUM_GENERATED = 1_000
"""Number of tasks that are compared of an endless split."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A held-out task, and a training task with the same or nearly the same question."""

    heldout_id: str
    train_id: str
    similarity: float
    """1 for the same words; else the share of the held-out question's eight-word passages that the
    training question contains. Short questions count only with the same words: a word at the end is
    in one passage only, and may be the whole difference."""
    question: str


@dataclass(frozen=True, slots=True)
class Contamination:
    """The overlaps of two splits."""

    num_train: int
    """Number of compared training tasks."""
    num_heldout: int
    overlaps: Sequence[Overlap]

    @property
    def num_same(self) -> int:
        """Number of held-out questions that occur in training word for word."""
        return sum(overlap.similarity == 1 for overlap in self.overlaps)


def find_contamination(
    env: TextEnv | TaskSource,
    *,
    train: str = "train",
    heldout: str = "test",
    threshold: float = 0.8,
) -> Contamination:
    """Compare the questions of two splits: the last message that opens an episode of an
    environment; of a task source, the field `question` or `prompt`, else all fields.

    Of each held-out task, the most similar training task is reported if it is as similar as
    `threshold`. Up to 20,000 tasks of a split are looked at, or 1,000 where it has no end. A split
    that does not exist is a UsageError.
    """
    learned = list(_questions(env, train))
    measured = list(_questions(env, heldout))
    same = {key_of_text(text): id for id, text in reversed(learned)}
    by_shingle: dict[int, list[int]] = {}
    for number, (_, text) in enumerate(learned):
        for shingle in _shingles(text):
            by_shingle.setdefault(shingle, []).append(number)
    overlaps = []
    for id, text in measured:
        twin = same.get(key_of_text(text))
        if twin is not None:
            overlaps.append(Overlap(id, twin, 1.0, text))
        elif nearest := _nearest(_shingles(text), by_shingle, threshold):
            number, similarity = nearest
            # Rewordings may have all the passages, and are not the same.
            overlaps.append(Overlap(id, learned[number][0], min(similarity, 0.999), text))
    return Contamination(len(learned), len(measured), tuple(overlaps))


def _questions(env: TextEnv | TaskSource, split: str) -> Iterable[tuple[str, str]]:
    limit = env.num_tasks(split)
    for index in range(_NUM_GENERATED if limit is None else min(limit, _MAX_TASKS)):
        if isinstance(env, TextEnv):
            text, info = env.reset(seed=0, options={"split": split, "index": index})
            yield info["task_id"], text
        else:
            task = env.at(index, split)
            yield task.id, question_of(task)


def _shingles(text: str) -> set[int]:
    words = key_of_text(text).split()
    return {hash(tuple(words[i : i + _SHINGLE])) for i in range(len(words) - _SHINGLE + 1)}


def _nearest(
    shingles: set[int], by_shingle: Mapping[int, Sequence[int]], threshold: float
) -> tuple[int, float] | None:
    if len(shingles) < _MIN_SHINGLES:
        return None
    counts = Counter(number for shingle in shingles for number in by_shingle.get(shingle, ()))
    number, count = min(counts.items(), key=lambda item: (-item[1], item[0]), default=(0, 0))
    similarity = count / len(shingles)
    return (number, similarity) if count and similarity >= threshold else None
