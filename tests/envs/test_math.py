from __future__ import annotations

import json

import pytest

import areal_gym
from areal_gym.envs.arithmetic import evaluate
from areal_gym.envs.math import MathEnv
from areal_gym.errors import ConfigError, DataError, NothingToDoError, UsageError
from tests._support.paths import SHARED


@pytest.mark.parametrize("level", range(1, 6))
def test_each_math_level_mixes_expressions_and_stories(level):
    env = MathEnv(level=level)
    questions = []
    for seed in range(60):
        observation, info = env.reset(seed=seed)
        data = info["task"]["data"]
        assert observation == data["question"]
        assert "{" not in observation
        assert evaluate(data["expression"]) == int(data["answer"])
        questions.append(data["expression"] in observation)
    assert 10 < sum(questions) < 50


def test_right_answer_terminates_with_reward_parts():
    env = MathEnv()
    env.reset(seed=1)
    _, reward, terminated, truncated, info = env.step(env.gold_action())
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["reward_parts"] == {"answer": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("action", "is_formatted"), [(r"\boxed{x}", 1.0), ("no idea", 0.0), ("", 0.0)]
)
def test_wrong_answer_terminates_without_reward(action, is_formatted):
    env = MathEnv()
    env.reset(seed=1)
    step = env.step(action)
    assert (step.reward, step.terminated) == (0.0, True)
    assert step.info["reward_parts"] == {"answer": 0.0, "format": is_formatted}


def test_repeating_the_expression_is_not_an_answer():
    env = MathEnv()
    env.reset(seed=1)
    assert env.step(f"\\boxed{{{env.task.data['expression']}}}").reward == 0.0


def test_file_questions_are_graded_symbolically(tmp_path):
    path = tmp_path / "q.jsonl"
    rows = [
        {"problem": "Half?", "solution": "Think.\n#### 1/2"},
        {"problem": "Root?", "solution": r"\sqrt{3}/3"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    env = MathEnv(
        tasks={
            **{"data": path, "test": path},
            "fields": {"question": "problem", "answer": "solution"},
        }
    )
    assert (env.num_tasks("train"), env.num_tasks("test")) == (0, 2)
    for index, answer in enumerate(["0.5", r"\frac{1}{\sqrt{3}}"]):
        env.reset(options={"split": "test", "index": index})
        assert env.step(f"\\boxed{{{answer}}}").reward == 1.0
        env.reset(options={"split": "test", "index": index})
        assert env.step(env.gold_action()).reward == 1.0
    with pytest.raises(NothingToDoError):
        env.reset(seed=0)


def test_wrong_attempt_is_reported_and_discounts_the_reward():
    env = MathEnv(max_turns=3, discount=0.25)
    env.reset(seed=1)
    first, second = env.step("hm"), env.step(r"\boxed{x}")
    assert "no answer" in first.observation
    assert "not right" in second.observation
    third = env.step(env.gold_action())
    assert (third.reward, third.terminated) == (0.25**2, True)
    assert [step.info["metrics"] for step in (first, second, third)] == [{"attempts": 1}] * 3


def test_last_wrong_attempt_truncates():
    env = MathEnv(max_turns=2)
    env.reset(seed=1)
    env.step(r"\boxed{x}")
    step = env.step(r"\boxed{x}")
    assert (step.reward, step.truncated, step.observation) == (0.0, True, "")
    assert step.info["reward_parts"] == {"answer": 0.0, "format": 1.0}


DATA = SHARED / "data"


@pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data")
@pytest.mark.parametrize(("env_id", "num_test"), [("math/gsm8k", 1319), ("math/math500", 500)])
def test_public_questions_are_read_from_the_data_directory(monkeypatch, env_id, num_test):
    monkeypatch.setenv("AREAL_GYM_DATA", str(DATA))
    env = areal_gym.make(env_id)
    assert env.num_tasks("test") == num_test
    assert env.num_tasks("train") > 7000
    for index in range(20):
        for split in ("train", "test"):
            env.reset(options={"split": split, "index": index})
            assert env.step(env.gold_action()).reward == 1.0
            env.reset(options={"split": split, "index": index})
            assert env.step(env.noop_action()).reward == 0.0


@pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data")
def test_row_without_answer_is_named_or_skipped(monkeypatch):
    file = DATA / "math_train" / "train.jsonl.gz"
    with pytest.raises(DataError, match="line 887: field 'answer' is None") as caught:
        MathEnv(tasks={"data": file, "fields": {"question": "problem"}})
    assert "env.kwargs.tasks={data: " in caught.value.hints[0]
    assert "skip_broken: true" in caught.value.hints[0]
    env = MathEnv(tasks={"data": file, "fields": {"question": "problem"}, "skip_broken": True})
    assert env.task_source.num_skipped == 4


def test_missing_data_file_error_names_the_paths_tried(monkeypatch, tmp_path):
    monkeypatch.setenv("AREAL_GYM_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"has no gsm8k/train\.jsonl") as caught:
        areal_gym.make("math/gsm8k")
    assert str(tmp_path / "gsm8k" / "train.parquet") in caught.value.hints[0]


def test_unreachable_hub_error_suggests_the_data_directory(monkeypatch):
    def unreachable(*args, **kwargs):
        raise DataError("no hub")

    monkeypatch.delenv("AREAL_GYM_DATA", raising=False)
    monkeypatch.setattr("areal_gym.envs.questions.hub_tasks", unreachable)
    with pytest.raises(DataError, match="no hub") as caught:
        areal_gym.make("math/math500")
    assert "math500/test.jsonl: export AREAL_GYM_DATA=DIR" in caught.value.hints[0]


def test_broken_csv_is_named_with_its_row(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text('question,answer\n"never closed,1\n')
    with pytest.raises(DataError, match=r"q\.csv, row 1: not CSV: unexpected end of data"):
        MathEnv(tasks=path)


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_json_csv_and_parquet_files(tmp_path, suffix):
    rows = [{"question": f"{n} and {n}?", "answer": str(2 * n)} for n in range(50)]
    path = tmp_path / f"q{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
        table = datasets.Dataset.from_list(rows)
        table.to_csv(path) if suffix == ".csv" else table.to_parquet(path)
    env = MathEnv(tasks=path)
    assert env.num_tasks("train") + env.num_tasks("test") == 50
    env.reset(options={"split": "train", "index": 0})
    assert env.step(env.gold_action()).reward == 1.0


def test_unavailable_dataset_error_names_it():
    with pytest.raises((DataError, ConfigError)) as caught:
        MathEnv(tasks="no-such-owner/no-such-dataset")
    assert "no-such-owner/no-such-dataset" in str(caught.value)
    assert caught.value.hints


def test_wrong_math_arguments_are_refused(tmp_path):
    with pytest.raises(UsageError, match="tasks has 'test', but no data"):
        MathEnv(tasks={"test": tmp_path})
    with pytest.raises(DataError, match="No such file"):
        MathEnv(tasks=tmp_path / "q.txt")
    with pytest.raises(UsageError, match="at least one turn"):
        MathEnv(max_turns=0)
    with pytest.raises(UsageError, match="no level 9"):
        MathEnv(level=9)
    with pytest.raises(DataError, match="cannot read"):
        MathEnv(tasks="no/such/file.jsonl")
