from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.envs.arithmetic import canonical
from areal_gym.envs.countdown import countdown_tasks
from areal_gym.envs.math import MathEnv, math_tasks
from areal_gym.envs.tir import tir_tasks
from areal_gym.errors import DataError, NothingToDoError, UsageError
from areal_gym.tasks import Draft, GeneratedTasks, choose_task, split_of


def key_of(task):
    if "numbers" in task.data:
        return f"{sorted(task.data['numbers'])} -> {task.data['target']}"
    return canonical(task.data["expression"])


SOURCES = [tir_tasks(level) for level in range(1, 6)]
SOURCES += [math_tasks(level) for level in range(1, 6)]
SOURCES += [countdown_tasks(3), countdown_tasks(4)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_tasks_are_distinct_and_never_in_training(source):
    tasks = [source.at(index, "test") for index in range(512)]
    keys = {key_of(task) for task in tasks}
    assert len(keys) == len({task.id for task in tasks}) == 512
    assert {split_of(key) for key in keys} == {task.split for task in tasks} == {"test"}
    assert keys.isdisjoint(key_of(source.at(index, "train")) for index in range(512))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**62), source=st.sampled_from(SOURCES))
def test_drawn_training_tasks_are_never_test_tasks(seed, source):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        assert split_of(key_of(source.draw(rng, "train"))) == "train"
    assert split_of(key_of(source.draw(rng, "test"))) == "test"


def test_one_tenth_of_keys_is_held_out():
    share = sum(split_of(str(n)) == "test" for n in range(10_000)) / 10_000
    assert share == pytest.approx(0.1, abs=0.01)


def test_equal_seeds_draw_equal_tasks():
    source = tir_tasks(2)
    first, second = (source.draw(np.random.default_rng(7), "train") for _ in range(2))
    assert first == second
    assert first != source.draw(np.random.default_rng(8), "train")


def test_indexed_tasks_do_not_depend_on_earlier_calls():
    first, second = (
        GeneratedTasks("n", lambda r: Draft(str(n := r.random()), {"n": n})) for _ in "ab"
    )
    assert first.at(5, "test") == [second.at(i, "test") for i in (9, 0, 5)][2]


@pytest.mark.parametrize("options", [{"split": "tset"}, {"index": -1}, {"index": True}])
def test_wrong_task_options_are_refused(options):
    with pytest.raises(UsageError):
        choose_task(tir_tasks(2), np.random.default_rng(0), options)


def test_exhausted_generator_names_its_number_of_tasks():
    source = GeneratedTasks("coin", lambda rng: Draft(str(rng.randint(0, 20)), {}))
    with pytest.raises(UsageError, match="coin has only"):
        source.at(100, "train")


# ---- files --------------------------------------------------------------------------------------


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(path, **kwargs):
    with pytest.warns(DeprecationWarning, match="give way to tasks="):
        return MathEnv(path=path, **kwargs).task_source


def test_unknown_split_is_refused(tmp_path):
    source = source_of(write(tmp_path / "q.jsonl", rows(30)))
    assert source.num_tasks("train") + source.num_tasks("test") == 30
    with pytest.raises(UsageError, match="no split 'tset'") as caught:
        source.num_tasks("tset")
    assert caught.value.hints == ("did you mean 'test'?", "available: train, test")


def rows(num, prefix="question"):
    return [{"question": f"{prefix} {n}?", "answer": str(n)} for n in range(num)]


def test_file_is_split_by_its_questions(tmp_path):
    source = source_of(write(tmp_path / "q.jsonl", rows(200)))
    num = {split: source.num_tasks(split) for split in ("train", "test")}
    assert sum(num.values()) == 200
    assert 5 <= num["test"] <= 40
    ids = {source.at(i, split).id for split in num for i in range(num[split])}
    assert len(ids) == 200


def test_repeated_questions_count_once_despite_case_and_space(tmp_path):
    repeated = [{"question": "Why  me?", "answer": 1}, {"question": "why me?", "answer": 2}]
    source = source_of(write(tmp_path / "q.jsonl", repeated + rows(30)))
    assert source.num_tasks("train") + source.num_tasks("test") == 31


def test_file_is_the_test_split_and_removed_from_training(tmp_path):
    source = source_of(
        write(tmp_path / "train.jsonl", rows(20)), test_path=write(tmp_path / "t.jsonl", rows(5))
    )
    assert source.num_tasks("test") == 5
    assert source.num_tasks("train") == 15
    assert source.at(0, "train").data["question"] == "question 5?"


def test_compressed_file_with_other_field_names(tmp_path):
    path = tmp_path / "q.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"problem": "one?", "solution": 1.5}\n'))
    source = source_of(path, test_path=path, question_field="problem", answer_field="solution")
    task = source.at(0, "test")
    assert task.data["answer"] == "1.5"
    assert task.id.startswith("q/1-")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b"[1]", "a row is an object"),
        (b'{"question": "2?"}', "no field 'answer'"),
        (b'{"question": "", "answer": "2"}', "field 'question' is ''"),
        (b'{"question": "2?", "answer": null}', "field 'answer' is None"),
        (b'{"question": "2?", "answer": true}', "field 'answer' is True"),
        (b'{"question": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_row_is_named_with_file_and_line(tmp_path, line, problem):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"question": "1?", "answer": "1"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=problem) as caught:
        source_of(path)
    assert f"{path}, line 3" in str(caught.value)


def test_mistyped_field_gets_a_suggestion(tmp_path):
    with pytest.raises(DataError) as caught:
        source_of(write(tmp_path / "q.jsonl", rows(1)), answer_field="anwser")
    assert caught.value.hints[0] == "did you mean 'answer'?"


def test_missing_empty_and_truncated_files(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        source_of(tmp_path / "none.jsonl")
    with pytest.raises(NothingToDoError, match="has no rows"):
        source_of(write(tmp_path / "empty.jsonl", []))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"question": "1?", "answer": "1"}\n' * 99)[:-12])
    with pytest.raises(DataError, match="cannot read"):
        source_of(cut)


def test_empty_split_and_out_of_range_index_are_errors(tmp_path):
    path = write(tmp_path / "q.jsonl", rows(3))
    source = source_of(path, test_path=path)
    with pytest.raises(NothingToDoError, match="no task in split 'train'"):
        source.draw(np.random.default_rng(0), "train")
    with pytest.raises(UsageError, match="has 3 such tasks"):
        source.at(3, "test")
