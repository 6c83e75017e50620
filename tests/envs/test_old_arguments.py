"""File arguments of earlier versions: the same tasks, ids and splits, and a warning."""

import inspect
import json

import pytest

import areal_gym
from areal_gym.envs.code.code_env import CodeEnv
from areal_gym.envs.countdown import CountdownEnv
from areal_gym.envs.math import MathEnv
from areal_gym.envs.search.search_env import SearchEnv
from areal_gym.envs.tir import TirEnv
from areal_gym.errors import DataError, UsageError

WARNING = "give way to tasks="


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tasks_of(env):
    return {
        split: [env.tasks.at(i, split) for i in range(env.num_tasks(split))]
        for split in ("train", "test")
    }


QUESTIONS = [{"q": f"{n}?", "question": f"{n}?", "answer": str(n), "level": n} for n in range(90)]
CODE = [
    {"question": f"{n}?", "entry_point": "f", "tests": [{"args": [n], "result": n}]}
    for n in range(40)
]
NUMBERS = [{"nums": [n, 2, 3], "target": 5 * n} for n in range(1, 40)]


@pytest.mark.parametrize(
    ("env", "rows", "old", "new"),
    [
        ("math", QUESTIONS, {}, {}),
        ("tir", QUESTIONS, {"question_field": "q"}, {"fields": {"question": "q"}}),
        ("math", QUESTIONS, {"where": {"level": {"min": 30}}}, {"where": {"level": {"min": 30}}}),
        ("math", [*QUESTIONS, {}], {"skip_broken": True}, {"skip_broken": True}),
        ("code", CODE, {}, {}),
        ("countdown", NUMBERS, {"skip_broken": True}, {"skip_broken": True}),
    ],
)
def test_old_and_new_arguments_give_the_same_tasks(tmp_path, env, rows, old, new):
    path = write(tmp_path / "q.jsonl", rows)
    with pytest.warns(DeprecationWarning, match=WARNING):
        before = tasks_of(areal_gym.make(env, path=path, **old))
    assert before["test"]
    assert tasks_of(areal_gym.make(env, tasks={"data": path, **new})) == before
    test = write(tmp_path / "test.jsonl", rows[:9])
    with pytest.warns(DeprecationWarning, match=WARNING):
        before = tasks_of(areal_gym.make(env, path=str(path), test_path=str(test), **old))
    settings = {"data": str(path), "test": str(test), **new}
    assert tasks_of(areal_gym.make(env, tasks=settings)) == before


def test_an_id_never_changes(tmp_path):
    """Runs of earlier versions are resumed: ids and splits are as they were written down."""
    path = write(tmp_path / "q.jsonl", QUESTIONS[:12])
    with pytest.warns(DeprecationWarning, match=WARNING):
        tasks = tasks_of(MathEnv(path=path))
    assert tasks["train"][0].id == "q/1-6c2c6f19"
    assert [task.id for task in tasks["test"]] == ["q/9-028a19c5"]


def test_signatures_have_the_new_arguments_only():
    for env in (MathEnv, TirEnv, CodeEnv, CountdownEnv, SearchEnv):
        names = set(inspect.signature(env).parameters)
        assert "tasks" in names
        assert not names & {"path", "test_path", "dataset", "questions", "where", "skip_broken"}


def test_old_arguments_that_contradict_are_refused(tmp_path):
    path = write(tmp_path / "q.jsonl", QUESTIONS)
    for arguments, problem in (
        ({"path": path, "dataset": "gsm8k"}, "two sources"),
        ({"test_path": path}, "test_path goes with path"),
        ({"where": {"level": 1}}, "there is neither"),
        ({"path": path, "tasks": path}, "tasks and path are two sources"),
    ):
        with (
            pytest.raises(UsageError, match=problem),
            pytest.warns(DeprecationWarning, match=WARNING),
        ):
            MathEnv(**arguments)
    with pytest.raises(UsageError, match="unexpected keyword argument 'pat'"):
        areal_gym.make("math", pat=path)


def test_public_data_sets_take_old_filters(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_GYM_DATA", str(tmp_path))
    (tmp_path / "gsm8k").mkdir()
    for name in ("train", "test"):
        rows = [{"question": f"{name} {n}?", "answer": f"#### {n}", "n": n} for n in range(30)]
        write(tmp_path / "gsm8k" / f"{name}.jsonl", rows)
    with pytest.warns(DeprecationWarning, match=WARNING):
        before = tasks_of(areal_gym.make("math/gsm8k", where={"n": {"max": 3}}))
    assert len(before["test"]) == 4
    settings = {"data": "gsm8k", "where": {"n": {"max": 3}}}
    assert tasks_of(areal_gym.make("math", tasks=settings)) == before
    with pytest.warns(DeprecationWarning, match=WARNING):
        assert tasks_of(areal_gym.make("tir", dataset="gsm8k", where={"n": {"max": 3}})) == before
    with pytest.raises(UsageError, match="'skip_broken', which does not go with gsm8k"):
        areal_gym.make("math", tasks={"data": "gsm8k", "skip_broken": True})


def test_settings_of_an_old_run_are_accepted(tmp_path):
    from areal_gym.config import load_config
    from areal_gym.runs.components import Components

    path = write(tmp_path / "q.jsonl", QUESTIONS)
    config = load_config(overrides=["env.id=math", f"env.kwargs.path={path}"])
    with pytest.warns(DeprecationWarning, match=WARNING):
        assert Components.of(config).make_env().num_tasks("train") == 82
    config = load_config(overrides=["env.id=math", "env.kwargs.path=none.jsonl"])
    with (
        pytest.raises(DataError, match=r"none\.jsonl"),
        pytest.warns(DeprecationWarning, match=WARNING),
    ):
        Components.of(config)
