"""The environment of own prompts: rows, messages, rewards, tools."""

from __future__ import annotations

import json

import pytest

import areal_gym
from areal_gym.envs.checker import check_env
from areal_gym.errors import ConfigError, DataError, EnvError, UsageError

CODE = '''
import areal_gym

def exact(completion, answer):
    return float(completion.strip() == answer)

def brief(completion):
    return -len(completion) / 100

def needs_solution(completion, solution):
    return 1.0

def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

def untyped(a: complex) -> str:
    return ""

class Counter:
    def __init__(self):
        self.total = 0

    @areal_gym.tool
    def count(self) -> str:
        """Count on."""
        self.total += 1
        return str(self.total)

class Empty:
    pass
'''
ROWS = [{"prompt": f"What is {n}+1?", "answer": str(n + 1)} for n in range(13)]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    file = tmp_path_factory.mktemp("with a space") / "rewards.py"
    file.write_text(CODE)
    return str(file)


def make(tasks=ROWS, reward="exact", index=0, **kwargs):
    env = areal_gym.make("prompts", tasks=tasks, reward=reward, **kwargs)
    env.reset(seed=0, options={"index": index})
    return env


def test_rewards_get_the_row_and_are_recorded_by_name(code):
    env = make(reward=[f"{code}:exact", f"{code}:brief=0.5"], index=3)
    step = env.step("4")
    assert (step.reward, step.terminated) == (1 - 0.005, True)
    assert step.info["reward_parts"] == {"exact": 1.0, "brief": -0.01}
    assert (env.num_tasks("train"), env.num_tasks("test")) == (13, 0)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "a"}, [("system", "s"), ("user", "a")]),
        ({"question": "a"}, [("system", "s"), ("user", "a")]),
        ({"prompt": [{"role": "user", "content": "a"}]}, [("system", "s"), ("user", "a")]),
        (
            {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "a"}]},
            [("system", "x"), ("user", "a")],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}]},
                    {"role": "assistant", "content": "an answer to imitate"},
                ]
            },
            [("system", "s"), ("user", "a")],
        ),
    ],
)
def test_prompts_are_texts_or_messages(row, messages):
    env = make([{**row, "answer": "4"}], system_prompt="s")
    assert [(m["role"], m["content"]) for m in env.messages] == messages
    assert env.step("4").reward == 1


def test_tools_are_called_until_an_answer(code):
    env = make(tools=[f"{code}:add", f"{code}:Counter"], index=2)
    assert env.step(call("add", a=1, b=2)).observation == "3"
    assert env.step(call("count") * 2).observation == "2"
    assert env.step("3").reward == 1
    env.reset(seed=0)
    assert env.step(call("count")).observation == "1"  # a new object in each episode


def test_the_last_turn_is_scored_also_with_calls(code):
    seen = []

    def reward(tool_results, messages):
        seen.append((list(tool_results), messages[-1]["role"]))
        return 0.5

    env = make(reward=reward, tools=f"{code}:add", max_turns=2)
    env.step(call("add", a=1, b=2))
    step = env.step(call("add", a=3, b=4))
    assert (step.reward, step.terminated, step.truncated) == (0.5, False, True)
    assert seen == [(["3", "7"], "tool")]


def test_values_of_other_libraries_are_plain_in_tasks():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"prompt": ["a", "b"], "answer": ["x", None], "at": pandas.to_datetime(["2026-01-01"] * 2)}
    )
    env = make(frame, reward=lambda completion, answer: float(answer is None), index=1)
    assert json.loads(json.dumps(dict(env.task.data)))["at"].startswith("2026-01-01")
    assert env.step("?").reward == 1


def test_errors_of_rewards_name_the_row():
    def broken(completion):
        raise RuntimeError("oops")

    env = make(reward=broken, index=2)
    with pytest.raises(EnvError, match=r"broken.*RuntimeError: oops.*rows/3") as error:
        env.step("4")
    assert "never" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "error", "message", "hint"),
    [
        ({"tasks": None}, UsageError, "which data", "--data prompts.jsonl"),
        ({"reward": None}, UsageError, "which reward", "--reward rewards.py:exact"),
        ({"reward": "CODE:needs_solution"}, DataError, "row 1.*'solution'", "available: prompt"),
        ({"reward": "CODE:exakt"}, ConfigError, "no reward 'exakt'", "did you mean 'exact'"),
        ({"tools": "CODE:ad"}, ConfigError, "no tool 'ad'", "did you mean 'add'"),
        ({"tools": "CODE:untyped"}, ConfigError, "is no tool: no JSON schema", ""),
        ({"tools": "CODE:Empty"}, ConfigError, "has no tool", "@areal_gym.tool"),
        ({"tools": "CODE:Counter.count"}, ConfigError, "'count' is a method", "name the class"),
        ({"tools": ["CODE:add", "CODE:add"]}, ConfigError, "two tools are called 'add'", ""),
        ({"tools": "CODE"}, UsageError, "names no tool", "rewards.py:NAME"),
        ({"tasks": [*ROWS, {"prompt": "a"}]}, DataError, "row 14: no field 'answer'", ""),
        ({"tasks": [{"text": "a", "answer": "b"}]}, DataError, "row 1: no prompt", "prompt=COLUMN"),
        ({"tasks": [{"prompt": " ", "answer": "b"}]}, DataError, "the prompt is empty", ""),
        ({"tasks": [{"prompt": 3, "answer": "b"}]}, DataError, "the prompt is 3", ""),
        (
            {"tasks": [{"prompt": [{"role": "bot", "content": "a"}], "answer": "b"}]},
            DataError,
            "row 1: message 1 of the prompt has the role 'bot'",
            "",
        ),
        ({"tasks": [{"prompt": "a", "answer": b"b"}]}, DataError, "a bytes cannot be recorded", ""),
        ({"prompt": "text"}, DataError, "no field 'text'", "available: prompt, answer"),
    ],
)
def test_bad_input_is_named(code, given, error, message, hint):
    def filled(value):
        if isinstance(value, str):
            return value.replace("CODE", code)
        return [filled(one) for one in value] if isinstance(value, list) else value

    with pytest.raises(error, match=message) as raised:
        make(**{name: filled(value) for name, value in given.items()})
    assert hint in " ".join(raised.value.hints)


def test_the_contract_is_kept(code, tmp_path):
    data = tmp_path / "prompts.jsonl"
    rows = [{**row, "gold": row["answer"]} for row in ROWS]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    kwargs = {"tasks": str(data), "reward": f"{code}:exact", "tools": f"{code}:Counter"}
    results = check_env("prompts", num_tasks=2, num_concurrent=8, kwargs=kwargs)
    assert [result for result in results if not result.is_ok] == []
