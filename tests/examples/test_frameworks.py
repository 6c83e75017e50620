"""Agents of LangChain and CAMEL play and train where those optional packages are installed."""

import asyncio
import json

import pytest
import torch

from areal_gym.agents.black_box import OpenAIFunctionAgent
from areal_gym.config import load_config
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.tir import TirEnv
from areal_gym.rollout.episode import play_episode
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from areal_gym.types import StopReason, Task
from tests._support.paths import ROOT

EXAMPLES = ROOT / "examples"


REQUIRED_MODULES = {
    "langchain": ["langchain.agents", "langchain_openai"],
    "camel": ["camel.agents"],
}


@pytest.fixture(params=list(REQUIRED_MODULES))
def function(request):
    for module in REQUIRED_MODULES[request.param]:
        reason = f"optional package {module} is not installed or cannot be imported"
        pytest.importorskip(module, reason=reason, exc_type=ImportError)
    return f"{EXAMPLES}/{request.param}_agent.py:solve"


def call(tool, code="print(6*7)"):
    arguments = {"code": code}
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def play(function, replies, max_calls=8):
    task = Task(id="t", data={"question": "What is 6*7?", "answer": "42"})
    episode = play_episode(
        TirEnv(),
        OpenAIFunctionAgent(function, max_calls=max_calls),
        ScriptedEngine(replies),
        byte_renderer(),
        options={"task": task},
        params=SamplingParams(max_new_tokens=300),
        timeout_s=30,
    )
    return asyncio.run(episode)


def test_environment_runs_the_tools(function):
    trajectory = play(function, [call("python"), "It is \\boxed{42}."])
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.reward == 1.0
    # One dialogue, extended token by token: the framework kept every message.
    assert (len(trajectory.branches), len(trajectory.turns)) == (1, 2)
    (result,) = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert result == "42"


def test_parallel_calls_get_one_result_each(function):
    both = call("python", "print(6*6)") + call("python", "print(6*8)")
    trajectory = play(function, [both, "It is \\boxed{42}."])
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    results = {m["tool_call_id"]: m["content"] for m in trajectory.messages if m["role"] == "tool"}
    (calls,) = [m["tool_calls"] for m in trajectory.messages if m.get("tool_calls")]
    assert [results[call["id"]] for call in calls] == ["36", "48"]


def test_unknown_tool_is_the_policys_mistake(function):
    trajectory = play(function, [call("calculator"), "It is \\boxed{42}."])
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.reward == 1.0
    assert len(trajectory.turns) == 2


def test_policy_that_never_answers_is_truncated(function):
    trajectory = play(function, lambda question: call("python"), max_calls=3)
    assert trajectory.stop_reason is StopReason.MAX_TURNS, trajectory.error
    assert len(trajectory.turns) == 3


def test_framework_agent_trains(function, tiny_policy, tmp_path):
    torch.set_num_threads(1)
    settings = [
        "env.id=tir",
        f"engine.model={tiny_policy}",
        "engine.num_slots=8",
        "agent.id=openai",
        f"agent.kwargs.function={function}",
        "rollout.group_size=2",
        "rollout.batch_groups=1",
        "rollout.max_in_flight=4",
        "rollout.max_new_tokens=8",
        "eval.num_tasks=2",
        "trainer.advantage=reinforce",
        "steps=1",
    ]
    train(load_config(None, settings), run_dir=tmp_path / "run")
    directory = RunDir(tmp_path / "run")
    (row,) = directory.read_metrics()
    assert row["rollout/failures/agent_error"] == 0
    trajectories = list(directory.read_trajectories(1))
    assert len(trajectories) == 2
    assert all(t.num_policy_tokens for t in trajectories)
