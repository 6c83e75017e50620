from __future__ import annotations

from collections import Counter

import pytest

import areal_gym
from areal_gym.errors import UnknownIdError, UsageError

TWO = [{"id": "tir", "weight": 0.7}, {"id": "math", "weight": 0.3}]


def test_mix_draws_tasks_by_weight():
    env = areal_gym.make("mix", envs=TWO)
    drawn = Counter(env.reset(seed=seed)[1]["task"]["data"]["env"] for seed in range(600))
    assert 370 < drawn["tir"] < 470
    assert drawn.total() == 600


def test_mix_indices_alternate_by_weight():
    env = areal_gym.make("mix", envs=TWO)
    seen = []
    for index in range(100):
        env.reset(options={"split": "test", "index": index})
        seen.append(env.task.id)
    names = [id.partition("/")[0] for id in seen]
    assert Counter(names) == {"tir": 70, "math": 30}
    assert Counter(names[:10]) == {"tir": 7, "math": 3}
    assert len(set(seen)) == 100


def test_mix_passes_over_exhausted_environments(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(3)))
    few = {"id": "math", "kwargs": {"tasks": {"data": str(path), "test": str(path)}}}
    env = areal_gym.make("mix", envs=[few, {"id": "countdown"}])
    for index in range(10):
        env.reset(options={"split": "test", "index": index})
    assert env.task.data["env"] == "countdown"
    both = areal_gym.make("mix", envs=[few, {**few, "name": "again"}])
    assert (env.num_tasks("test"), both.num_tasks("test")) == (None, 6)
    with pytest.raises(UsageError, match="there are 6 tasks"):
        both.reset(options={"split": "test", "index": 6})


def test_mix_task_has_tools_and_limits_of_its_environment():
    envs = [{"id": "tir", "kwargs": {"max_turns": 4, "tool_dialect": "fenced"}}, {"id": "math"}]
    env = areal_gym.make("mix", envs=envs)
    for index in range(2):
        env.reset(options={"split": "test", "index": index})
        is_tir = env.task.data["env"] == "tir"
        assert ([tool.name for tool in env.tools], env.max_turns, env.tool_dialect) == (
            (["python"], 4, "fenced") if is_tir else ([], 1, None)
        )
        assert env.played_id == env.task.data["env"]
        step = env.step(env.gold_action())
        if is_tir:
            assert step.info["metrics"]["tool_calls"] == 1
            step = env.step(env.gold_action())
        assert (step.reward, step.terminated) == (1.0, True)
        assert step.info["reward_parts"]["answer"] == 1.0
    env.close()


def test_mix_truncates_at_the_turn_limit():
    env = areal_gym.make("mix", envs=[{"id": "math", "kwargs": {"max_turns": 2}}])
    env.reset(seed=0)
    env.step("hm")
    step = env.step("hm")
    assert (step.terminated, step.truncated) == (False, True)
    assert step.info["truncated_by"] == "max_turns"


@pytest.mark.parametrize(
    ("envs", "problem"),
    [
        ([], "no environments"),
        ([{"weight": 1}], "an environment of a mix is"),
        ([{"id": "tir", "wieght": 1}], "an environment of a mix is"),
        ([{"id": "tir", "weight": 0}], "the weight of tir is 0"),
        ([{"id": "tir"}, {"id": "tir"}], "in the mix twice"),
    ],
)
def test_invalid_mix_is_refused(envs, problem):
    with pytest.raises(UsageError, match=problem):
        areal_gym.make("mix", envs=envs)


def test_mix_names_unknown_environments():
    with pytest.raises(UnknownIdError, match="'tri'"):
        areal_gym.make("mix", envs=[{"id": "tri"}])
