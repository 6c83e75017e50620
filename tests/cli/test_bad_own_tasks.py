"""Wrong rewards, rows and classes on the command line: each is named, with what to type."""

from __future__ import annotations

import json

import pytest

from areal_gym.cli.app import run

CODE = """
import time

def ok(completion):
    return 1.0 if completion.startswith("W") else 0.5

def nan(completion):
    return float("nan")

def text(completion):
    return "good"

def many(completions):
    return [1.0, 2.0]

def raises(completion, answer):
    return {}[answer]

def hangs(completion):
    while True:
        time.sleep(0.01)

hangs.timeout_s = 0.05

class Odd(BaseException):
    pass

def odd(completion):
    raise Odd("not an Exception")

def ends(completion):
    raise SystemExit(3)

def slow(completion):
    time.sleep(0.5)
    return 1.0

slow.timeout_s = 0.3

def none(completion):
    return None

def sometimes(completion, answer):
    return {"3": 1.0}[answer]

def needs(completion, solution):
    return 1.0

class NoEnv:
    pass
"""
STARTER = ["--model", "starter"]
ROWS = [{"prompt": f"What is {n}+1?", "answer": str(n + 1)} for n in range(9)]


@pytest.fixture
def train(tmp_path, monkeypatch, tiny_policy, capsys):
    """Return a function that runs `areal-gym train` and returns what it says on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def train(*arguments, model=str(tiny_policy)):
        small = ["rollout.max_new_tokens=4", "rollout.batch_groups=2", "rollout.group_size=2"]
        small += ["engine.max_context=128", "rollout.max_retries=0", "engine.num_slots=4"]
        options = ["--model", model, "--steps", "1", "--out", str(tmp_path / "run")]
        assert run(["train", *options, *arguments, *small]) != 0
        return capsys.readouterr().err

    return train


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("nan", ["'nan' returned nan, on rows.jsonl, line ", " (task rows/", "finite number"]),
        ("text", ["'text' returned 'good', on rows.jsonl, line ", "float(...)"]),
        (
            "many",
            ["'many' returned [1.0, 2.0], on rows.jsonl, line ", "2 rewards for 1 completion"],
        ),
        (
            "raises",
            [
                "'raises' raised KeyError",
                "mine.py, line 17",
                "on rows.jsonl, line ",
                "check --data DATA",
            ],
        ),
        ("hangs", ["'hangs' did not return within 0.05 s, on rows.jsonl, line ", '"timeout_s"']),
        ("ends", ["'ends' raised SystemExit: 3 (mine.py, line ", "on rows.jsonl, line "]),
        ("odd", ["'odd' raised Odd: not an Exception (mine.py, line ", "on rows.jsonl, line "]),
        ("none", ["no reward applies to rows.jsonl, line ", "return a number"]),
    ],
)
def test_a_broken_reward_is_told_of_before_anything_starts(train, tmp_path, reward, words):
    said = train("--data", "rows.jsonl", "--reward", f"mine.py:{reward}", model="starter")
    for word in [*words, "tried before the start, on 3 of the rows"]:
        assert word in said
    assert "warm start" not in said
    assert not (tmp_path / "run").exists()


def test_a_reward_that_fails_for_some_rows_is_a_warning(train):
    said = train("--data", "rows.jsonl", "--reward", "mine.py:sometimes")
    assert "warning: reward 'sometimes' raised KeyError: '1' (mine.py, line " in said


def test_a_slow_reward_is_named_before_the_start(train, monkeypatch):
    monkeypatch.setattr("areal_gym.runs.reward_trial._TIME_LIMIT_S", 0.1)
    said = train("--data", "rows.jsonl", "--reward", "mine.py:slow")
    assert "warning: reward 'slow' took more than 0.1 s for an answer to rows.jsonl, line " in said
    assert "after 0.3 s (timeout_s) a call is given up" in said


def test_a_dry_run_opens_the_data_and_the_reward(train, capsys):
    assert run(["train", "--data", "rows.jsonl", "--reward", "exact", "--dry-run", *STARTER]) == 0
    assert "# tasks: " in (said := capsys.readouterr().out)
    assert "9 rows, and none is held out" in said
    assert "no reward 'exakt'" in train("--data", "rows.jsonl", "--reward", "exakt", "--dry-run")
    assert "line 1: no field 'solution'" in train(
        *("--data", "rows.jsonl", "--reward", "mine.py:needs", "--dry-run")
    )
    missing = train("--data", "nowhere.jsonl", "--reward", "exact", "--dry-run")
    assert "nowhere.jsonl: No such file" in missing


@pytest.mark.parametrize(
    ("line", "reward", "words"),
    [
        (
            '{"answer": "3"}',
            "mine.py:ok",
            ["line 4: no prompt", "env.kwargs.prompt=COLUMN", "skip_broken: true}"],
        ),
        ('{"prompt": 3}', "mine.py:ok", ["line 4: the prompt is 3; a text or messages"]),
        ('{"prompt": ""}', "mine.py:ok", ["line 4: the prompt is empty"]),
        (
            '{"prompt": [{"role": "usr", "content": "a"}]}',
            "mine.py:ok",
            ["line 4: message 1 of the prompt has the role 'usr'", "user"],
        ),
        ('["a"]', "mine.py:ok", ["line 4: a row is an object, not list", "such as"]),
        (
            '{"prompt"',
            "mine.py:ok",
            ["line 4: not JSON: Expecting ':' delimiter, in column 11", "sed -n 4p"],
        ),
        ('{"prompt": "a"}', "exact", ["line 4: no field 'answer'", "the reward 'exact' needs"]),
        (
            '{"prompt": "a", "answer": "b"}',
            "mine.py:needs",
            [
                "line 1: no field 'solution', which the reward 'needs' needs",
                "prompt, answer",
                "a reward may ask for: completion, messages, prompt, tool_results, row",
            ],
        ),
    ],
)
def test_a_broken_row_is_named_before_anything_starts(train, tmp_path, line, reward, words):
    rows = [json.dumps(row) for row in ROWS[:3]]
    (tmp_path / "bad.jsonl").write_text("\n".join([*rows, line, *rows]))
    said = train("--data", "bad.jsonl", "--reward", reward)
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists()


JUDGE = (
    'env.kwargs.reward={"reward": "judge", "kwargs": {"base_url": "https://judge.invalid/v1", '
    '"model": "j", "rubric": "Is it good?"}}'
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--env", "mine.py:NoEnv"], ["mine.py:NoEnv is no environment", "areal_gym.TextEnv"]),
        (
            ["--data", "nobody/nothing", "--reward", "exact"],
            ["cannot load the data set nobody/nothing", "is there a network?", ".jsonl"],
        ),
        (["--data", "rows.jsonl", "--reward", "judge"], ["'base_url'", '"kwargs": {...}']),
        (["--data", "rows.jsonl", JUDGE], ["needs a key", "export OPENAI_API_KEY"]),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(train, tmp_path, arguments, words):
    said = train(*arguments)
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists()


def test_an_environment_that_a_small_policy_cannot_learn_is_told_of(train, tmp_path, capsys):
    (tmp_path / "plain.jsonl").write_text("".join(f'{{"prompt": "W{n}?"}}\n' for n in range(40)))
    own = ["--data", "plain.jsonl", "--reward", "mine.py:ok"]
    reason = "the rows have no column 'answer' that a small policy could imitate"
    assert reason in train(*own, model="starter")
    assert run(["check", *own, "-n", "2", "--concurrent", "2"]) == 0
    assert f"name a model, such as --model Qwen/Qwen3-0.6B: {reason}" in capsys.readouterr().err
