from __future__ import annotations

import json

import pytest

import areal_gym
from areal_gym.envs.code.code_env import find_code
from areal_gym.envs.code.code_tasks import CODE_LEVELS, code_tasks
from areal_gym.errors import DataError, SandboxError, UsageError
from areal_gym.sandbox.base import SandboxResult, SandboxStatus

PLAIN = {
    "question": "Write add.",
    "entry_point": "add",
    "tests": [{"args": [n, 1], "result": n + 1} for n in range(4)],
    "solution": "def add(a, b):\n    return a + b",
}


def make_started(tmp_path, row=PLAIN, **kwargs):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row))
    env = areal_gym.make("code", tasks={"data": path, "test": path}, **kwargs)
    env.reset(options={"split": "test", "index": 0})
    return env


def block(code):
    return f"Here:\n```python\n{code}\n```"


@pytest.mark.parametrize("level", CODE_LEVELS)
def test_gold_solutions_pass_their_tests(level):
    env = areal_gym.make("code", level=level)
    for index in range(25):
        env.reset(options={"split": "train", "index": index})
        step = env.step(env.gold_action())
        assert (step.reward, step.terminated) == (1.0, True), env.task.data
        assert step.info["metrics"] == {"tests": 8, "tests_passed": 8}
        results = [str(test["result"]) for test in env.task.data["tests"]]
        assert len(set(results)) > 1


def test_code_levels_have_disjoint_train_and_test_functions():
    keys = {split: set() for split in ("train", "test")}
    for split, functions in keys.items():
        for index in range(60):
            functions.add(code_tasks(3).at(index, split).data["question"].partition("that ")[2])
    assert keys["train"].isdisjoint(keys["test"])
    with pytest.raises(UsageError, match="no level 4"):
        code_tasks(4)


@pytest.mark.parametrize(
    ("code", "share"),
    [
        ("def add(a, b):\n    return a + b", 1.0),
        ("def add(a, b):\n    return a + 1", 1.0),
        ("def add(a, b):\n    return 2", 0.25),
        ("def add(a, b):\n    if a > 1: raise ValueError\n    return a + b", 0.5),
        ("def add(a, b):\n    return a +", 0.0),
        ("def sub(a, b):\n    return a + b", 0.0),
        ("def add(a, b):\n    return str(a + b)", 0.0),
        ("def add(a, b):\n    return float(a + b)", 0.0),
        ("def add(a, b):\n    while True: pass", 0.0),
        ("def add(a, b):\n    return [0] * 10**9", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("def add(a, b):\n    import os; os._exit(0)", 0.0),
        ("def add(a, b):\n    exit()", 0.0),
        ("print = eval = exec = repr = None\ndef add(a, b):\n    return a + b", 0.0),
    ],
)
def test_code_reward_is_the_share_of_passed_tests(tmp_path, code, share):
    step = make_started(tmp_path).step(block(code))
    assert step.reward == share
    assert step.info["reward_parts"] == {"tests": share, "format": 1.0}


def test_expected_results_do_not_enter_the_sandbox(tmp_path):
    row = {**PLAIN, "tests": [{"args": [], "result": "s3cret"}], "entry_point": "f"}
    spy = """
def f():
    import gc, sys
    wanted = bytes.fromhex("733363726574").decode()
    frames = [sys._getframe(n) for n in range(2)]
    seen = [c for frame in frames for c in frame.f_code.co_consts]
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple)):
            seen += [v for v in (thing.values() if isinstance(thing, dict) else thing)]
    return next((s for s in seen if isinstance(s, str) and s == wanted), 0)
"""
    assert make_started(tmp_path, row).step(block(spy)).reward == 0.0


def test_all_or_nothing_needs_every_test(tmp_path):
    half = block("def add(a, b):\n    return 2")
    assert make_started(tmp_path, all_or_nothing=True).step(half).reward == 0.0
    env = make_started(tmp_path, all_or_nothing=True)
    assert env.step(env.gold_action()).reward == 1.0


def test_code_can_be_revised_within_max_turns(tmp_path):
    env = make_started(tmp_path, max_turns=3)
    assert "no code" in env.step("hm").observation
    assert "1 of 4 tests pass" in env.step(block("def add(a, b):\n    return 2")).observation
    step = env.step(env.gold_action())
    assert (step.reward, step.terminated) == (1.0, True)
    env = make_started(tmp_path, max_turns=1)
    assert env.step("hm").terminated


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nno:\n```py\nb\n```", "b"),
        ("```\na\n```", "a"),
        ("```python\na", "a"),
        ("def f(): pass", "def f(): pass"),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_find_code_takes_the_last_block(text, code):
    assert find_code(text) == code


MBPP = {
    "text": "Write a function to find the first repeated character.",
    "code": "def first(s):\n    return next((c for i, c in enumerate(s) if c in s[:i]), None)",
    "test_setup_code": "",
    "test_list": [
        'assert first("abca") == "a"',
        'assert first("abc") == None',
        'assert set([first("aa")]) == {"a"}',
    ],
}
HUMANEVAL = {
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum."""\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(xs)\n",
    "test": "def check(f):\n    assert f([1, 2]) == 3\n    assert f([]) == 0",
}


@pytest.mark.parametrize(("row", "num_tests"), [(MBPP, 3), (HUMANEVAL, 1)])
def test_mbpp_and_humaneval_rows(tmp_path, row, num_tests):
    env = make_started(tmp_path, row)
    assert env.task.data["entry_point"] in env.messages[-1]["content"]
    step = env.step(env.gold_action())
    assert step.reward == 1.0
    assert step.info["metrics"]["tests"] == num_tests
    env = make_started(tmp_path, row)
    name = env.task.data["entry_point"]
    assert env.step(block(f"def {name}(x):\n    return 99")).reward == 0.0


def test_fifty_tests_are_run(tmp_path):
    row = {**PLAIN, "tests": [{"args": [n, n], "result": 2 * n} for n in range(50)]}
    env = make_started(tmp_path, row)
    step = env.step(env.gold_action())
    assert (step.reward, step.info["metrics"]["tests_passed"]) == (1.0, 50)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "?", "entry_point": "f"}, "tests = None"),
        ({"question": "?", "entry_point": "f", "tests": [{"args": 1, "result": 1}]}, "tests = "),
        ({"question": "?", "tests": [{"args": [], "result": 1}]}, "no field 'entry_point'"),
        ({"text": "?", "test_list": []}, "a list of texts"),
        ({"entry_point": "f", "test": "x"}, "no field 'prompt'"),
    ],
)
def test_broken_code_rows_are_named(tmp_path, row, problem):
    with pytest.raises(DataError, match=problem) as caught:
        make_started(tmp_path, row)
    assert "q.jsonl, line 1" in str(caught.value)


def test_failing_sandbox_is_a_sandbox_error(tmp_path):
    class Broken:
        async def run(self, code, *, limits=None):
            return SandboxResult(status=SandboxStatus.UNAVAILABLE, stderr="gone")

    env = make_started(tmp_path, sandbox=Broken())
    with pytest.raises(SandboxError, match="gone"):
        env.step(env.gold_action())
