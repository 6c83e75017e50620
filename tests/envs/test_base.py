from __future__ import annotations

import asyncio
import math
import os

import numpy as np
import pytest

from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.spaces import TextSpace
from areal_gym.envs.tools import Tool, tool
from areal_gym.errors import EnvError, NothingToDoError, RewardError, ToolError, UsageError
from areal_gym.types import Task


@tool
def add(a: int, b: int = 1) -> str:
    """Add two numbers.

    More about it.
    """
    return str(a + b)


class Echo(TextEnv):
    """Returns the result of the response factory."""

    tools = (add,)

    def __init__(self, respond=None, render_mode=None):
        super().__init__(render_mode=render_mode)
        self._respond = respond

    def sample_task(self, rng, options):
        if options.get("split") == "empty":
            raise NothingToDoError("nothing")
        return Task(id=str(rng.integers(10**9)), data={"rows": [1, {"deep": 2}]})

    def first_messages(self, task):
        return [{"role": "user", "content": "hello"}]

    async def respond(self, message):
        if self._respond is not None:
            return self._respond()
        results = await self.call_tools(message)
        return Response(messages=results.messages, metrics={"errors": results.num_errors})


class Sleeper(Echo):
    suspends = True

    async def respond(self, message):
        await asyncio.sleep(0)
        return Response(reward=1, is_terminated=True)


def make_started(cls=Echo, **kwargs):
    env = cls(**kwargs)
    env.reset(seed=0)
    return env


def call(name="add", arguments="{}"):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize("reward", [1, True, 0.5, np.float32(0.5), np.int64(1), np.bool_(True)])
def test_every_real_number_type_is_a_reward(reward):
    step = make_started(respond=lambda: Response(reward=reward, is_terminated=True)).step("x")
    assert type(step.reward) is float
    assert step.reward == float(reward)


@pytest.mark.parametrize("reward", [None, "1", math.nan, math.inf, 1j])
def test_nonfinite_or_non_number_reward_is_an_env_error(reward):
    with pytest.raises(EnvError, match="finite number"):
        make_started(respond=lambda: Response(reward=reward)).step("x")


@pytest.mark.parametrize(
    ("field_name", "what"),
    [
        ("reward_parts", "part of the reward"),
        ("role_rewards", "reward of the role"),
        ("metrics", "metric"),
    ],
)
def test_named_numbers_that_are_not_finite_name_the_environment_and_themselves(field_name, what):
    for value in (math.nan, math.inf, "abc", None, 10**400):
        response = Response(**{field_name: {"format": value}})
        env = make_started(respond=lambda response=response: response)
        with pytest.raises(RewardError, match="finite number is needed") as caught:
            env.step("x")
        assert f"Echo.respond gave the {what} 'format' = {repr(value)[:50]}" in str(caught.value)
    for wrong in ({3: 1.0}, {None: 1.0}, [1.0], None):
        response = Response(**{field_name: wrong})
        env = make_started(respond=lambda response=response: response)
        with pytest.raises(RewardError, match=rf"Echo.respond gave {field_name}") as caught:
            env.step("x")
        assert f"as in Response({field_name}=" in caught.value.hints[0]


def test_named_numbers_of_any_real_type_are_plain_floats():
    parts = {"a": np.float32(0.5), "b": np.bool_(True), "c": 2}
    step = make_started(respond=lambda: Response(reward_parts=parts, metrics=parts)).step("x")
    assert step.info["reward_parts"] == step.info["metrics"] == {"a": 0.5, "b": 1.0, "c": 2.0}
    assert {*map(type, step.info["metrics"].values())} == {float}


@pytest.mark.parametrize("key", [["a"], {"room": 1}, ("a", 1), 3, 0, b"a"])
def test_state_key_that_is_not_a_text_is_refused(key):
    env = make_started(respond=lambda: Response(state_key=key))
    with pytest.raises(EnvError, match=r"Echo\.respond gave the state_key") as caught:
        env.step("x")
    assert repr(key) in str(caught.value)
    assert "state_key=str(state)" in caught.value.hints[0]


def test_terminated_and_truncated_are_never_both():
    env = make_started(respond=lambda: Response(is_terminated=True))
    env.max_turns = 1
    step = env.step("x")
    assert (step.terminated, step.truncated) == (True, False)


def test_turn_limit_truncates():
    env = make_started(respond=Response)
    env.max_turns = 2
    assert env.step("x").truncated is False
    step = env.step("x")
    assert step.truncated is True
    assert step.info["truncated_by"] == "max_turns"
    with pytest.raises(UsageError, match="the episode is over"):
        env.step("x")


def test_exception_in_respond_is_an_env_error():
    def crash():
        raise KeyError("row")

    env = make_started(respond=crash)
    with pytest.raises(EnvError, match="KeyError"):
        env.step("x")
    with pytest.raises(UsageError, match="over"):
        env.step("x")


def test_env_usage_errors_are_explained():
    env = Echo()
    with pytest.raises(UsageError, match="reset"):
        _ = env.task
    with pytest.raises(UsageError, match="reset"):
        env.step("x")
    with pytest.raises(UsageError, match="not a task"):
        env.reset(options={"task": {"rows": 1}})
    with pytest.raises(NothingToDoError):
        env.reset(options={"split": "empty"})
    env.reset()
    with pytest.raises(UsageError, match="NoneType"):
        env.step(None)


def test_missing_suspends_flag_is_explained():
    class Forgetful(Sleeper):
        suspends = False

    with pytest.raises(EnvError, match="suspends = True"):
        make_started(Forgetful).step("x")


def test_suspending_environment_steps_synchronously_and_after_fork():
    assert make_started(Sleeper).step("x").reward == 1
    pid = os.fork()
    if pid == 0:
        os._exit(0 if make_started(Sleeper).step("x").reward == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_tasks_are_frozen():
    env = make_started()
    with pytest.raises(TypeError):
        env.task.data["rows"] = []
    with pytest.raises(TypeError):
        env.task.data["rows"][1]["deep"] = 3


def test_equal_seeds_reset_to_equal_tasks():
    assert make_started().task == make_started().task
    env = make_started()
    first = env.task
    env.reset()
    assert env.task != first


# ---- tools --------------------------------------------------------------------------------------


def test_tool_schema_comes_from_its_function():
    assert add.schema() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (call(arguments='{"a": 2, "b": 3}'), "5"),
        (call(arguments='{"a": 2}'), "3"),
        (call(), "error: add takes (a, b); missing: a"),
        (call(arguments='{"a": 1, "c": 2}'), "error: add takes (a, b); unknown: c"),
        (call(arguments='{"a": "1"}'), "error: add takes (a, b); a is no integer"),
        (call(arguments='{"a": true}'), "error: add takes (a, b); a is no integer"),
        (call("sub"), "error: no tool 'sub'; there is: add"),
    ],
)
def test_tool_calls_and_argument_errors_are_answered(action, answer):
    step = make_started().step(action)
    assert step.observation == answer
    assert step.info["metrics"]["errors"] == answer.startswith("error")


def test_number_of_tool_calls_is_limited():
    step = make_started().step(call(arguments='{"a": 2}') * 1_000)
    assert len(step.info["messages"]) == Echo.max_calls + 1
    assert step.observation == "error: 984 more calls were not run; at most 16 are"


def test_optional_and_asynchronous_tools():
    @tool
    async def shout(text: str, times: int | None = None, tags: list[str] | None = None) -> str:
        """Loudly."""
        await asyncio.sleep(0)
        return text.upper() * (times or 1)

    assert asyncio.run(shout({"text": "a", "times": None})) == "A"
    assert shout.parameters["properties"]["tags"] == {"type": "array", "items": {"type": "string"}}
    with pytest.raises(ToolError, match="times is no integer"):
        asyncio.run(shout({"text": "a", "times": 1.5}))
    with pytest.raises(ToolError, match="cannot be called here"):
        asyncio.run(Tool(name="x", description="", parameters={})({}))


class Counter(Echo):
    """Its tools are methods: they see the episode."""

    suspends = True

    @tool
    def count(self, by: int = 1) -> str:
        """Count on."""
        self.total += by
        return str(self.total)

    @tool(in_thread=True)
    def show(self) -> str:
        """Show the count."""
        return f"it is {self.total}"

    tools = (count, show)

    def first_messages(self, task):
        self.total = 0
        return super().first_messages(task)


def test_tools_may_be_methods():
    assert list(Counter.count.parameters["properties"]) == ["by"]
    env, other = make_started(Counter), make_started(Counter)
    assert [env.step(call("count", "{}")).observation for _ in range(2)] == ["1", "2"]
    assert env.step(call("show", "{}")).observation == "it is 2"
    assert other.step(call("count", "{}")).observation == "1"
    assert asyncio.run(env.count({"by": 3})) == "5"
    with pytest.raises(UsageError, match="'count' is a method and has no object"):
        asyncio.run(Counter.count({}))


def test_tool_parameter_without_schema_is_refused():
    with pytest.raises(TypeError, match="no JSON schema"):

        @tool
        def broken(x: complex) -> str:
            return str(x)


# ---- spaces -------------------------------------------------------------------------------------


def test_text_space_contains_any_text():
    space = TextSpace(max_length=5)
    assert "" in space
    assert "\ud800 \0é" in space
    assert "123456" not in space
    assert 5 not in space
    assert space.sample() in space
    assert space == TextSpace(5)
    assert space != TextSpace(6)
    assert space.from_jsonable(space.to_jsonable(["a", "b"])) == ["a", "b"]


class Careless(TextEnv):
    """Returns malformed messages or responses, exits, and fails to close."""

    suspends = True

    def __init__(self, first=None, answer=None):
        super().__init__()
        self.first = first or [{"role": "user", "content": "Go."}]
        self.answer = answer

    def sample_task(self, rng, options):
        return Task(id="1", data={})

    def first_messages(self, task):
        return self.first

    async def respond(self, message):
        if self.answer == "exit":
            raise SystemExit(7)
        return self.answer

    async def aclose(self):
        raise OSError("no such container")


@pytest.mark.parametrize(
    "message", [{"content": "hi"}, {"role": "user", "content": 3}, {"role": "user"}, "hi", None]
)
def test_malformed_messages_are_named(message):
    with pytest.raises(EnvError, match=r"first_messages gave .*which is not a message"):
        Careless(first=[message]).reset(seed=0)
    env = Careless(answer=Response(messages=[message]))
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"respond gave .*which is not a message"):
        env.step("hi")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [(None, "gave None, which is not a Response"), ("exit", r"respond failed: SystemExit\(7\)")],
)
def test_missing_response_and_exit_are_env_errors(answer, complaint):
    env = Careless(answer=answer)
    env.reset(seed=0)
    with pytest.raises(EnvError, match=complaint):
        env.step("hi")
    with pytest.raises(EnvError, match="aclose failed"):
        env.close()
