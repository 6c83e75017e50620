from __future__ import annotations

import json

import pytest

import areal_gym
from areal_gym.envs.contamination import find_contamination
from areal_gym.errors import DataError, NothingToDoError, UsageError

LONG = (
    "A train leaves the station at noon and travels at forty miles an hour for three hours "
    "before it stops. How far has it gone by then?"
)


class Leaky(areal_gym.TextEnv):
    """Its splits are the given questions."""

    tasks = {"train": [], "test": []}

    def num_tasks(self, split):
        return len(self.tasks[split])

    def sample_task(self, rng, options):
        split, index = options["split"], options["index"]
        text = self.tasks[split][index]
        return areal_gym.Task(id=f"{split}/{index}", data={"q": text}, split=split)

    def first_messages(self, task):
        return [{"role": "user", "content": task.data["q"]}]


def leaky(train, test):
    env = Leaky()
    env.tasks = {"train": train, "test": test}
    return env


def test_equal_questions_overlap_despite_case_and_space():
    contamination = find_contamination(leaky(["One  plus one?", "x"], ["two?", "one plus ONE?"]))
    (overlap,) = contamination.overlaps
    assert (overlap.heldout_id, overlap.train_id, overlap.similarity) == ("test/1", "train/0", 1)
    assert (contamination.num_train, contamination.num_heldout, contamination.num_same) == (2, 2, 1)


def test_reworded_question_overlaps():
    reworded = LONG.replace("How far has it gone by then?", "Tell how far it has gone by then.")
    contamination = find_contamination(leaky(["x", reworded], [LONG]), threshold=0.5)
    (overlap,) = contamination.overlaps
    assert overlap.train_id == "train/1"
    assert 0.5 < overlap.similarity < 1
    assert contamination.num_same == 0
    assert not find_contamination(leaky(["x", reworded], [LONG]), threshold=0.95).overlaps


def test_other_numbers_do_not_overlap():
    other = LONG.replace("forty", "fifty").replace("three", "nine").replace("noon", "dawn")
    assert not find_contamination(leaky([other], [LONG])).overlaps


@pytest.mark.parametrize("env_id", ["math", "tir", "search", "code", "countdown"])
def test_built_in_splits_do_not_overlap(env_id):
    contamination = find_contamination(areal_gym.make(env_id))
    assert contamination.num_same == 0
    assert contamination.num_heldout > 100
    if env_id == "search":  # its splits are finite: all of it is compared
        assert not contamination.overlaps


def test_short_questions_differing_in_one_word_do_not_overlap():
    first, other = (f"From which town is the author of The Quiet Bridge of {x}?" for x in "AB")
    assert not find_contamination(leaky([first], [other])).overlaps
    assert find_contamination(leaky([first], [first])).num_same == 1


def questions(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_where_filters_rows_by_fields(tmp_path):
    rows = [
        {"question": f"{n}?", "answer": str(n), "level": n % 5, "subject": "AB"[n % 2]}
        for n in range(100)
    ]
    path = questions(tmp_path / "q.jsonl", rows)

    def count(**where):
        env = areal_gym.make("math", tasks={"data": path, "where": where})
        return env.num_tasks("train") + env.num_tasks("test")

    assert count(subject="A") == 50
    assert count(level=[1, 2]) == 40
    assert count(level={"min": 3}) == 40
    assert count(level={"min": 1, "max": 2}, subject="B") == 20
    with pytest.raises(NothingToDoError, match="has no rows left after 100 were filtered"):
        count(subject="C")
    with pytest.raises(DataError, match="line 1: no field 'subjetc'") as caught:
        count(subjetc="A")
    assert caught.value.hints[0] == "did you mean 'subject'?"
    with pytest.raises(UsageError, match="where level"):
        count(level={"most": 3})
    with pytest.raises(UsageError, match="tasks has 'where', but no data"):
        areal_gym.make("math", tasks={"where": {"level": 1}})
