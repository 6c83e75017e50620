from __future__ import annotations

import json

import pytest

from areal_gym.envs.arithmetic import evaluate
from areal_gym.envs.countdown import CountdownEnv, uses_exactly
from areal_gym.errors import DataError, UsageError
from tests._support.paths import SHARED

TASK = {"id": "x", "data": {"numbers": [75, 85, 71], "target": 81, "solution": "71-75+85"}}


@pytest.mark.parametrize("num_numbers", [3, 4, 5, 6])
def test_generated_countdown_tasks_are_solvable(num_numbers):
    env = CountdownEnv(num_numbers=num_numbers)
    for seed in range(50):
        data = env.reset(seed=seed)[1]["task"]["data"]
        assert evaluate(data["solution"]) == data["target"]
        assert uses_exactly(data["solution"], data["numbers"])
        assert len(data["numbers"]) == num_numbers
        assert data["target"] not in data["numbers"]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("71-75+85", 1.0),
        ("(85 + 71) − 75 = 81", 1.0),
        ("85+(71-75)*1", 0.1),
        ("81", 0.1),
        ("75+85", 0.1),
        ("75-75+81", 0.1),
        ("71-75+85 is it", 0.0),
        ("__import__('os')", 0.0),
        ("85**71", 0.0),
        ("85/(75-75)", 0.0),
        ("(" * 1000, 0.0),
        ("", 0.0),
    ],
)
def test_countdown_rewards(answer, reward):
    env = CountdownEnv()
    env.reset(options={"task": TASK})
    step = env.step(f"I think \\boxed{{{answer}}}")
    assert step.reward == reward
    assert step.terminated


def test_latex_operators_are_accepted():
    env = CountdownEnv()
    data = {"numbers": [6, 3, 4], "target": 8, "solution": "6*4/3"}
    env.reset(options={"task": {"id": "y", "data": data}})
    assert env.step(r"$\boxed{6 \times 4 \div 3}$").reward == 1.0


def test_too_many_numbers_are_refused_by_countdown():
    with pytest.raises(UsageError, match="num_numbers = 7"):
        CountdownEnv(num_numbers=7)


DATA = SHARED / "data" / "countdown"


@pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data")
def test_countdown_tasks_of_files():
    env = CountdownEnv(tasks={"data": DATA / "train.jsonl.gz", "test": DATA / "test.jsonl"})
    assert (env.num_tasks("train"), env.num_tasks("test")) == (4000, 500)
    for index in range(500):
        env.reset(options={"split": "test", "index": index})
        assert env.step(env.gold_action()).reward == 1.0


@pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data")
def test_unsolvable_tasks_have_no_gold_action():
    file = DATA / "unsolvable.jsonl"
    env = CountdownEnv(tasks={"data": file, "test": file})
    env.reset(options={"split": "test", "index": 0})
    assert env.step(env.gold_action()).reward == 0.0


@pytest.mark.parametrize(
    "row",
    [{"nums": [1, 2]}, {"nums": [], "target": 1}, {"nums": [1, -2], "target": 1}, {"target": 1}],
)
def test_broken_countdown_rows_are_named(tmp_path, row):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"nums": [1, 2], "target": 3}) + "\n" + json.dumps(row))
    with pytest.raises(DataError, match=r"c\.jsonl, line 2: nums = "):
        CountdownEnv(tasks=path)
