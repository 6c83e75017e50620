from __future__ import annotations

import pytest

from areal_gym.envs.arithmetic import evaluate
from areal_gym.envs.countdown import CountdownEnv, uses_exactly
from areal_gym.errors import UsageError

TASK = {"id": "x", "data": {"numbers": [75, 85, 71], "target": 81, "solution": "71-75+85"}}


@pytest.mark.parametrize("num_numbers", [3, 4, 5, 6])
def test_every_task_is_solvable(num_numbers):
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
def test_rewards(answer, reward):
    env = CountdownEnv()
    env.reset(options={"task": TASK})
    step = env.step(f"I think \\boxed{{{answer}}}")
    assert step.reward == reward
    assert step.terminated


def test_latex_operators_count():
    env = CountdownEnv()
    data = {"numbers": [6, 3, 4], "target": 8, "solution": "6*4/3"}
    env.reset(options={"task": {"id": "y", "data": data}})
    assert env.step(r"$\boxed{6 \times 4 \div 3}$").reward == 1.0


def test_too_many_numbers_are_refused():
    with pytest.raises(UsageError, match="num_numbers = 7"):
        CountdownEnv(num_numbers=7)
