"""What `tasks=` may hold, and how large data are held out and drawn without being read whole."""

import json

import numpy as np
import pytest

from areal_gym.errors import DataError, NothingToDoError, UsageError
from areal_gym.tasks import Draft, GeneratedTasks, given_tasks, large_row_tasks, open_tasks
from areal_gym.tasks.large_row_tasks import LargeRowTasks
from areal_gym.tasks.row_checks import text_field
from areal_gym.tasks.row_tasks import key_of_text


def rows(num, prefix="question"):
    return [{"question": f"{prefix} {n}?", "answer": str(n), "level": n % 5} for n in range(num)]


def draft(row):
    question = text_field(row, "question")
    return Draft(key_of_text(question), {"question": question, "answer": row.data.get("answer")})


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counts(given):
    source = open_tasks(given, draft)
    return source.num_tasks("train"), source.num_tasks("test")


def test_few_rows_are_all_trained_on_and_more_are_split():
    assert counts(rows(19)) == (19, 0)
    assert "19 rows, and none is held out" in open_tasks(rows(19), draft).notes[0]
    train, test = counts(rows(200))
    assert (train + test, 5 < test < 40) == (200, True)
    assert f"{test} of 200 rows are held out" in open_tasks(rows(200), draft).notes[0]
    assert counts({"data": rows(200), "heldout": 0}) == (200, 0)
    assert counts({"data": rows(200), "heldout": 0.5})[1] > 70


def test_splits_of_data_are_kept(tmp_path):
    for given in (
        {"train": rows(30), "test": rows(4, "other")},
        {"data": rows(30), "test": rows(4, "other")},
        {"data": {"train": rows(30), "validation": rows(4, "other")}},
    ):
        assert counts(given) == (30, 4)
        assert open_tasks(given, draft).notes == ()
    assert counts({"data": rows(30), "test": rows(4)}) == (26, 4)


def test_settings_choose_rows_and_columns():
    problems = [{"problem": f"{n}?", "level": n % 5} for n in range(100)]
    settings = {"data": problems, "fields": {"question": "problem"}, "where": {"level": {"max": 1}}}
    assert sum(counts(settings)) == 40
    assert sum(counts({"data": [*rows(30), {"question": ""}], "skip_broken": True})) == 30


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"data": rows(3), "were": {}}, "tasks has no setting 'were'"),
        ({"where": {"level": 1}}, "tasks has 'where', but no data"),
        ({"data": rows(3), "heldout": 2}, "heldout = 2"),
        ({"data": rows(3), "heldout": 0.5, "test": rows(1)}, "heldout and a test split"),
        ({"data": rows(3), "fields": {"question": "promt"}}, "row 1: no field 'promt'"),
        ({"dev": rows(3), "extra": rows(2)}, "has no split train or test, but dev, extra"),
        (7, "data is a int"),
    ],
)
def test_wrong_settings_are_refused(given, problem):
    with pytest.raises((UsageError, DataError), match=problem):
        open_tasks(given, draft)


def test_a_source_is_taken_as_it_is():
    source = GeneratedTasks("n", lambda rng: Draft(str(rng.random()), {}))
    assert open_tasks(source, draft) is source


def test_a_file_is_read_once_and_again_when_it_changed(tmp_path):
    path = write(tmp_path / "q.jsonl", rows(30))
    first = open_tasks(path, draft)
    assert open_tasks(path, draft) is first
    write(path, rows(50))
    assert sum(counts(path)) == 50


# ---- large data ---------------------------------------------------------------------------------


@pytest.fixture
def few_in_memory(monkeypatch):
    monkeypatch.setattr(given_tasks, "MOST_IN_MEMORY", 100)
    monkeypatch.setattr(large_row_tasks, "MAX_HELD_OUT", 40)


def test_large_data_hold_out_some_rows_and_train_on_none_of_them(tmp_path, few_in_memory):
    repeated = [*rows(600), *rows(600)]  # every question twice
    source = open_tasks(write(tmp_path / "q.jsonl", repeated), draft)
    assert isinstance(source, LargeRowTasks)
    heldout = [source.at(index, "test") for index in range(source.num_tasks("test"))]
    questions = {task.data["question"] for task in heldout}
    assert 35 < len(questions) == len(heldout) <= 40
    assert {task.split for task in heldout} == {"test"}
    trained = [source.at(index, "train") for index in range(source.num_tasks("train"))]
    rng = np.random.default_rng(0)
    trained += [source.draw(rng, "train") for _ in range(500)]
    assert questions.isdisjoint(task.data["question"] for task in trained)
    again = open_tasks({"data": str(tmp_path / "q.jsonl")}, draft)
    assert [again.at(i, "test") for i in range(len(heldout))] == heldout
    assert f"{len(heldout):,} of" in source.notes[0]
    with pytest.raises(UsageError, match=r"has .* such tasks"):
        source.at(10**6, "train")


def test_large_data_with_a_test_split_and_filters(few_in_memory):
    source = open_tasks(
        {"data": rows(300), "test": rows(20), "where": {"level": [0, 1]}, "skip_broken": True},
        draft,
    )
    assert (source.num_tasks("train"), source.num_tasks("test")) == (120, 8)
    tasks = [source.at(index, "train").data["question"] for index in range(120)]
    assert not {f"question {n}?" for n in (0, 1, 5, 6, 10, 11, 15, 16)} & set(tasks)
    assert counts({"data": rows(300), "heldout": 0}) == (300, 0)


def test_broken_rows_of_large_data_are_named_or_passed_over(few_in_memory):
    data = rows(300)
    data[150] = {"question": None}
    source = open_tasks({"data": data, "heldout": 0}, draft)
    with pytest.raises(DataError, match="row 151: field 'question' is None"):
        source.at(150, "train")
    source = open_tasks({"data": data, "heldout": 0, "skip_broken": True}, draft)
    assert source.at(150, "train").data["question"] == "question 151?"
    source = open_tasks({"data": data, "test": data, "skip_broken": True}, draft)
    with pytest.raises(DataError, match="can be trained on"):
        source.at(0, "train")
    with pytest.raises(NothingToDoError, match="no task in split 'test'"):
        open_tasks({"data": data, "heldout": 0}, draft).draw(np.random.default_rng(0), "test")
