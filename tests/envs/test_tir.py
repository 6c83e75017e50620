from __future__ import annotations

import asyncio
import json

import pytest

from areal_gym.envs.base import run_on_kept_loop
from areal_gym.envs.tir import SYSTEM_PROMPT, TirEnv, python_call
from areal_gym.errors import SandboxError, UnknownIdError
from areal_gym.sandbox.base import SandboxResult, SandboxStatus

TASK = {
    "id": "x",
    "data": {"question": "What is 37*48+12?", "expression": "37*48+12", "answer": "1788"},
}


class FixedSandbox:
    """Gives one result, and writes down what it was asked to run."""

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


def started(**kwargs):
    env = TirEnv(**kwargs)
    env.reset(seed=0, options={"task": TASK})
    return env


def test_the_formats_are_fixed():
    env = started()
    assert [message["content"] for message in env.messages] == [SYSTEM_PROMPT, "What is 37*48+12?"]
    assert SYSTEM_PROMPT == r"Solve the problem. Put the final answer in \boxed{}."
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


def test_the_default_level_has_two_or_three_operands_of_up_to_two_digits():
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
def test_what_the_tool_says(code, observation, num_errors):
    step = started().step(python_call(code))
    if observation is not None:
        assert step.observation == observation
    assert step.info["metrics"] == {"tool_calls": 1, "tool_errors": num_errors}


REACHED = set(SandboxStatus) - {SandboxStatus.OK, SandboxStatus.UNAVAILABLE}


@pytest.mark.parametrize("status", sorted(REACHED))
def test_every_limit_is_told(status):
    env = started(sandbox=FixedSandbox(SandboxResult(status=status)))
    step = env.step(python_call("x"))
    assert step.observation
    assert step.info["metrics"]["tool_errors"] == 1


def test_an_unavailable_sandbox_is_no_result():
    env = started(sandbox=FixedSandbox(SandboxResult(status=SandboxStatus.UNAVAILABLE)))
    with pytest.raises(SandboxError):
        env.step(python_call("x"))


def test_a_sandbox_is_chosen_by_its_id():
    with pytest.raises(UnknownIdError, match="'proces'"):
        TirEnv(sandbox="proces")
    env = started(sandbox="process")
    assert env.step(python_call("print(6*7)")).observation == "42"


def test_long_output_is_cut():
    long = SandboxResult(status=SandboxStatus.OK, stdout="7" * 5_000)
    step = started(sandbox=FixedSandbox(long)).step(python_call("x"))
    assert step.observation == "7" * 2_000 + "... (3000 more characters)"


def test_only_assistant_text_is_graded():
    env = started()
    env.step(env.gold_action())
    assert env.step("It is what the tool says.").reward == 0.0
    env = started()
    assert env.step(r"\boxed{1788}" + python_call("print(1)")).terminated is False


def test_a_box_inside_a_call_is_no_answer():
    step = started().step(python_call(r"# \boxed{1788}"))
    assert (step.reward, step.terminated) == (0.0, False)


def test_a_malformed_call_is_explained():
    step = started().step("<tool_call>{oops</tool_call>")
    assert step.observation.startswith("error: ")
    assert not step.terminated
    assert step.info["metrics"] == {"tool_calls": 0, "tool_errors": 1}


@pytest.mark.parametrize(
    "arguments",
    [{}, {"code": 5}, {"code": "1", "x": 2}, {"code": "x" * 40_000}, {"code": "\ud800"}],
)
def test_bad_arguments_are_explained(arguments):
    call = json.dumps({"name": "python", "arguments": arguments})
    step = started().step(f"<tool_call>{call}</tool_call>")
    assert step.observation.startswith("error: ")
    assert step.info["metrics"]["tool_errors"] == 1


def test_three_turns_and_no_answer_is_a_truncation():
    env = started(sandbox=FixedSandbox())
    steps = [env.step(env.noop_action() and python_call("1")) for _ in range(3)]
    assert [step.truncated for step in steps] == [False, False, True]
    assert steps[-1].info["truncated_by"] == "max_turns"


def test_a_failing_sandbox_is_its_own_failure_not_a_reward():
    with pytest.raises(SandboxError, match="gone"):
        started(sandbox=FixedSandbox(SandboxError("gone"))).step(python_call("1"))


@pytest.mark.parametrize(("is_stateful", "observation"), [(True, "5"), (False, None)])
def test_names_live_on_in_a_stateful_episode_only(is_stateful, observation):
    env = started(stateful=is_stateful)
    env.step(python_call("x = 5"))
    step = env.step(python_call("print(x)"))
    assert step.observation == (observation or "NameError: name 'x' is not defined")
    env.close()


@pytest.mark.parametrize("ending", ["answer", "max_turns", "close"])
def test_a_stateful_episode_leaves_no_interpreter_behind(ending):
    sandbox = FixedSandbox()
    env = started(stateful=True, sandbox=sandbox)
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


def test_many_episodes_share_the_loops_sandbox():
    async def one(seed):
        env = TirEnv()
        env.reset(seed=seed)
        await env.astep(env.gold_action())
        return (await env.astep(env.gold_action())).reward

    async def all_of_them():
        return await asyncio.gather(*(one(seed) for seed in range(64)))

    assert run_on_kept_loop(all_of_them()) == [1.0] * 64
