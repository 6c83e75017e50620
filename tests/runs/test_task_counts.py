"""What a run says about its tasks before anything is waited for."""

import json

import pytest

from areal_gym.config import load_config
from areal_gym.errors import NothingToDoError, UsageError
from areal_gym.runs.components import Components
from areal_gym.runs.evaluation import evaluate
from areal_gym.runs.task_counts import announce_tasks
from areal_gym.runs.train import train


def questions(path, num):
    rows = ({"question": f"What is {n}+1?", "answer": str(n + 1)} for n in range(num))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def announced(tasks, *overrides, env="math"):
    config = load_config(
        overrides=[f"env.id={env}", *overrides], base={"env": {"kwargs": {"tasks": tasks}}}
    )
    lines = []
    return announce_tasks(config, Components.of(config), lines.append), lines


def test_thirteen_rows_are_all_trained_on(tmp_path):
    config, lines = announced(str(questions(tmp_path / "q.jsonl", 13)), "rollout.batch_groups=16")
    assert config.eval.num_tasks == 0
    assert "13 rows, and none is held out" in lines[0]
    assert "13 to train on, and a step takes 16 groups" in lines[1]
    assert "not evaluated on held-out tasks" in lines[2]


def test_a_share_of_more_rows_is_held_out_and_said(tmp_path):
    path = str(questions(tmp_path / "q.jsonl", 200))
    config, lines = announced(path)
    assert config.eval.num_tasks == 512
    assert "24 of 200 rows are held out for evaluation" in lines[0]
    assert "evaluates on all 24 of split 'test' (eval.num_tasks = 512)" in lines[1]
    config, lines = announced({"data": path, "heldout": 0}, "rollout.batch_groups=8")
    assert config.eval.num_tasks == 0
    assert "200 rows, and none is held out" in lines[0]


def test_generated_tasks_need_no_word():
    config = load_config(overrides=["env.id=tir"])
    lines = []
    assert announce_tasks(config, Components.of(config), lines.append) is config
    assert lines == []


def test_a_mix_says_what_its_environments_say(tmp_path):
    path = str(questions(tmp_path / "q.jsonl", 13))
    mix = [{"id": "math", "kwargs": {"tasks": path}}, {"id": "countdown"}]
    config = load_config(base={"env": {"id": "mix", "kwargs": {"envs": mix}}})
    lines = []
    announce_tasks(config, Components.of(config), lines.append)
    assert "13 rows, and none is held out" in lines[0]


def test_unknown_and_empty_splits_are_found_before_the_warm_start(tmp_path):
    path = str(questions(tmp_path / "q.jsonl", 13))
    with pytest.raises(UsageError, match="no split 'tset'"):
        announced(path, "eval.split=tset")
    with pytest.raises(NothingToDoError, match="nothing to train on"):
        announced({"data": path, "test": path})
    config = load_config(base={"env": {"id": "math", "kwargs": {"tasks": path}}})
    with pytest.raises(NothingToDoError, match="no tasks to evaluate on"):
        evaluate(config)
    with pytest.raises(NothingToDoError, match=r"eval\.num_tasks = 0"):
        evaluate(load_config(overrides=["env.id=tir", "eval.num_tasks=0"]))


def test_a_run_without_held_out_tasks_trains_and_resumes(tmp_path, tiny_policy):
    path = questions(tmp_path / "q.jsonl", 13)
    small = ("rollout.group_size=2", "rollout.batch_groups=2", "rollout.max_new_tokens=8")

    def run(steps, mode):
        config = load_config(
            overrides=[
                f"engine.model={tiny_policy}",
                "engine.num_slots=4",
                f"steps={steps}",
                *small,
            ],
            base={"env": {"id": "math", "kwargs": {"tasks": str(path)}}},
        )
        return train(config, run_dir=tmp_path / "run", mode=mode)

    summary = run(1, "new")
    assert (summary["num_steps"], summary["num_heldout_tasks"]) == (1, 0)
    assert "heldout_before" not in summary
    assert not (tmp_path / "run" / "evaluations.jsonl").exists()
    assert run(2, "resume")["num_steps"] == 2
