from __future__ import annotations

import json

import pytest

from areal_gym.envs.arithmetic import evaluate
from areal_gym.envs.math import MathEnv
from areal_gym.errors import DataError, NothingToDoError, UsageError


@pytest.mark.parametrize("level", range(1, 6))
def test_each_level_mixes_expressions_and_stories_with_whole_answers(level):
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


def test_a_right_answer_terminates_with_its_parts():
    env = MathEnv()
    env.reset(seed=1)
    _, reward, terminated, truncated, info = env.step(env.gold_action())
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["reward_parts"] == {"answer": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("action", "is_formatted"), [(r"\boxed{x}", 1.0), ("no idea", 0.0), ("", 0.0)]
)
def test_a_wrong_answer_terminates_without_reward(action, is_formatted):
    env = MathEnv()
    env.reset(seed=1)
    step = env.step(action)
    assert (step.reward, step.terminated) == (0.0, True)
    assert step.info["reward_parts"] == {"answer": 0.0, "format": is_formatted}


def test_repeating_the_expression_is_no_answer():
    env = MathEnv()
    env.reset(seed=1)
    assert env.step(f"\\boxed{{{env.task.data['expression']}}}").reward == 0.0


def test_questions_of_a_file_are_graded_symbolically(tmp_path):
    path = tmp_path / "q.jsonl"
    rows = [
        {"problem": "Half?", "solution": "Think.\n#### 1/2"},
        {"problem": "Root?", "solution": r"\sqrt{3}/3"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    env = MathEnv(path=path, test_path=path, question_field="problem", answer_field="solution")
    assert (env.num_tasks("train"), env.num_tasks("test")) == (0, 2)
    for index, answer in enumerate(["0.5", r"\frac{1}{\sqrt{3}}"]):
        env.reset(options={"split": "test", "index": index})
        assert env.step(f"\\boxed{{{answer}}}").reward == 1.0
        env.reset(options={"split": "test", "index": index})
        assert env.step(env.gold_action()).reward == 1.0
    with pytest.raises(NothingToDoError):
        env.reset(seed=0)


def test_bad_arguments():
    with pytest.raises(UsageError, match="no level 9"):
        MathEnv(level=9)
    with pytest.raises(DataError, match="cannot read"):
        MathEnv(path="no/such/file.jsonl")
