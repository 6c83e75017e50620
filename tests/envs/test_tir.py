from __future__ import annotations

import asyncio
import json

import pytest

from areal_gym.chat.tool_call_formats import DIALECTS, parse_assistant, write_call
from areal_gym.envs.base import run_on_kept_loop
from areal_gym.envs.tir import TirEnv, python_call
from areal_gym.errors import ConfigError, SandboxError, UnknownIdError, UsageError
from areal_gym.sandbox.base import SandboxResult, SandboxStatus

TASK = {
    "id": "x",
    "data": {"question": "What is 37*48+12?", "expression": "37*48+12", "answer": "1788"},
}


class FixedSandbox:
    """Returns one fixed result, and records the code."""

    def __init__(self, result=None):
        self.result = result or SandboxResult(status=SandboxStatus.OK, stdout="1788\n")
        self.codes = []
        self.num_open = 0

    async def run(self, code, *, limits=None):
        self.codes.append(code)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def session(self):
        self.num_open += 1
        return self

    async def aclose(self):
        self.num_open -= 1


def make_started(**kwargs):
    env = TirEnv(**kwargs)
    env.reset(seed=0, options={"task": TASK})
    return env


def test_tir_prompt_call_and_answer_formats():
    env = make_started()
    assert [message["content"] for message in env.messages] == [
        r"Solve the problem. Put the final answer in \boxed{}.",
        "What is 37*48+12?",
    ]
    call = env.gold_action()
    assert call == (
        '<tool_call>\n{"name": "python", "arguments": {"code": "print(37*48+12)"}}\n</tool_call>'
    )
    step = env.step(call)
    assert (step.observation, step.reward, step.terminated) == ("1788", 0.0, False)
    assert step.info["metrics"] == {"tool_calls": 1, "tool_errors": 0}
    assert env.gold_action() == r"\boxed{1788}"
    step = env.step(env.gold_action())
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)
    assert step.info["metrics"] == {"tool_calls": 0, "tool_errors": 0}


def test_tir_default_level_has_2_to_3_two_digit_operands():
    env = TirEnv()
    for seed in range(100):
        data = env.reset(seed=seed)[1]["task"]["data"]
        numbers = data["expression"].replace("+", " ").replace("-", " ").replace("*", " ").split()
        assert 2 <= len(numbers) <= 3
        assert all(1 <= int(number) <= 99 for number in numbers)


@pytest.mark.parametrize(
    ("code", "observation", "num_errors"),
    [
        ("6*7", "42", 0),
        ("print('a'); 5", "a", 0),
        ("x = 1", "", 0),
        ("print(1", "SyntaxError: '(' was never closed", 1),
        ("x ===", "SyntaxError: invalid syntax", 1),
        ("1/0", "ZeroDivisionError: division by zero", 1),
        ("open('/etc/passwd').read()", None, 1),
    ],
)
def test_python_tool_observations(code, observation, num_errors):
    step = make_started().step(python_call(code))
    if observation is not None:
        assert step.observation == observation
    assert step.info["metrics"] == {"tool_calls": 1, "tool_errors": num_errors}


REACHED = set(SandboxStatus) - {SandboxStatus.OK, SandboxStatus.UNAVAILABLE}


@pytest.mark.parametrize("status", sorted(REACHED))
def test_every_sandbox_limit_is_reported_to_the_policy(status):
    env = make_started(sandbox=FixedSandbox(SandboxResult(status=status)))
    step = env.step(python_call("x"))
    assert step.observation
    assert step.info["metrics"]["tool_errors"] == 1


def test_unavailable_sandbox_is_a_sandbox_error():
    env = make_started(sandbox=FixedSandbox(SandboxResult(status=SandboxStatus.UNAVAILABLE)))
    with pytest.raises(SandboxError):
        env.step(python_call("x"))


def test_sandbox_is_chosen_by_its_id():
    with pytest.raises(UnknownIdError, match="'proces'"):
        TirEnv(sandbox="proces")
    env = make_started(sandbox="process")
    assert env.step(python_call("print(6*7)")).observation == "42"


def test_long_output_is_truncated():
    long = SandboxResult(status=SandboxStatus.OK, stdout="7" * 5_000)
    step = make_started(sandbox=FixedSandbox(long)).step(python_call("x"))
    assert step.observation == "7" * 2_000 + "... (3000 more characters)"


def test_only_assistant_text_is_graded():
    env = make_started()
    env.step(env.gold_action())
    assert env.step("It is what the tool says.").reward == 0.0
    env = make_started()
    assert env.step(r"\boxed{1788}" + python_call("print(1)")).terminated is False


def test_box_inside_a_tool_call_is_not_an_answer():
    step = make_started().step(python_call(r"# \boxed{1788}"))
    assert (step.reward, step.terminated) == (0.0, False)


def test_malformed_call_is_explained():
    step = make_started().step("<tool_call>{oops</tool_call>")
    assert step.observation.startswith("error: ")
    assert not step.terminated
    assert step.info["metrics"] == {"tool_calls": 0, "tool_errors": 1}


@pytest.mark.parametrize(
    "arguments",
    [{}, {"code": 5}, {"code": "1", "x": 2}, {"code": "x" * 40_000}, {"code": "\ud800"}],
)
def test_wrong_tool_arguments_are_explained(arguments):
    call = json.dumps({"name": "python", "arguments": arguments})
    step = make_started().step(f"<tool_call>{call}</tool_call>")
    assert step.observation.startswith("error: ")
    assert step.info["metrics"]["tool_errors"] == 1


def test_three_turns_without_answer_truncate():
    env = make_started(sandbox=FixedSandbox())
    steps = [env.step(env.noop_action() and python_call("1")) for _ in range(3)]
    assert [step.truncated for step in steps] == [False, False, True]
    assert steps[-1].info["truncated_by"] == "max_turns"


def test_exception_in_the_sandbox_is_a_sandbox_error():
    with pytest.raises(SandboxError, match="gone"):
        make_started(sandbox=FixedSandbox(SandboxError("gone"))).step(python_call("1"))


@pytest.mark.parametrize(("is_stateful", "observation"), [(True, "5"), (False, None)])
def test_python_names_persist_in_stateful_episodes_only(is_stateful, observation):
    env = make_started(stateful=is_stateful)
    env.step(python_call("x = 5"))
    step = env.step(python_call("print(x)"))
    assert step.observation == (observation or "NameError: name 'x' is not defined")
    env.close()


@pytest.mark.parametrize("ending", ["answer", "max_turns", "close"])
def test_stateful_episode_closes_its_session(ending):
    sandbox = FixedSandbox()
    env = make_started(stateful=True, sandbox=sandbox)
    env.step(python_call("1"))
    assert sandbox.num_open == 1
    if ending == "answer":
        env.step("done")
    elif ending == "max_turns":
        env.step(python_call("1"))
        env.step(python_call("1"))
    env.close()
    env.close()
    assert sandbox.num_open == 0


def test_concurrent_episodes_share_the_loops_sandbox():
    async def run_episode(seed):
        env = TirEnv()
        env.reset(seed=seed)
        await env.astep(env.gold_action())
        return (await env.astep(env.gold_action())).reward

    async def run_all():
        return await asyncio.gather(*(run_episode(seed) for seed in range(64)))

    assert run_on_kept_loop(run_all()) == [1.0] * 64


@pytest.mark.parametrize("dialect", sorted(set(DIALECTS) - {"plain"}))
def test_tool_dialect_setting(dialect):
    env = make_started(tool_dialect=dialect, sandbox=FixedSandbox())
    message = parse_assistant(env.gold_action(), dialect)
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"]["code"].strip() == "print(37*48+12)"
    assert env.step(env.gold_action()).observation == "1788"
    assert env.step(env.gold_action()).reward == 1.0


def test_unknown_tool_dialect_is_refused():
    with pytest.raises(ConfigError, match="no tool dialect 'hermse'"):
        TirEnv(tool_dialect="hermse")
    with pytest.raises(ConfigError, match="only python is called"):
        write_call("calculator", {"expression": "1"}, "fenced")


def test_calculator_beside_or_instead_of_python():
    env = make_started(tools=("calculator",))
    step = env.step(env.gold_action())
    assert step.observation == "1788"
    assert env.step(env.gold_action()).reward == 1.0
    both = make_started(tools=("python", "calculator"), sandbox=FixedSandbox())
    call = write_call("calculator", {"expression": "2 * (3 + 4)^2"})
    step = both.step(call + python_call("1") + call)
    assert [message["content"] for message in step.info["messages"]] == ["98", "1788", "98"]
    assert step.info["metrics"]["calculator_calls"] == 2
    assert step.info["metrics"]["python_calls"] == 1
    for tools in ((), ("pyhton",), "python"):
        with pytest.raises(UsageError, match="a list of python and calculator"):
            TirEnv(tools=tools)


def test_max_tool_calls_refuses_and_counts():
    sandbox = FixedSandbox()
    env = make_started(max_tool_calls=2, max_turns=5, sandbox=sandbox)
    first = env.step(python_call("1"))
    second = env.step(python_call("2") + python_call("3"))
    assert first.info["metrics"]["tool_refused"] == 0
    assert second.info["metrics"] == {"tool_calls": 2, "tool_errors": 1, "tool_refused": 1}
    assert "used up" in second.observation
    assert len(sandbox.codes) == 2
    env.reset(options={"task": TASK})
    assert env.step(python_call("1")).info["metrics"]["tool_refused"] == 0


def test_tir_questions_of_a_file(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "A third of a half?", "answer": "1/6"}))
    env = TirEnv(tasks={"data": path, "test": path}, sandbox=FixedSandbox())
    env.reset(options={"split": "test", "index": 0})
    assert env.step(r"\boxed{\frac{1}{6}}").reward == 1.0
    env.reset(options={"split": "test", "index": 0})
    assert env.step(env.gold_action()).reward == 1.0
