"""The agent examples do what they document, and train on the embedded engine."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

from areal_gym.agents.black_box import OpenAIFunctionAgent
from areal_gym.agents.openai_agents import OpenAIAgentsAgent
from areal_gym.agents.program import ProgramAgent
from areal_gym.config import load_config
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.math import MathEnv
from areal_gym.envs.tir import TirEnv
from areal_gym.rollout.episode import play_episode
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from areal_gym.types import StopReason, Task
from tests._support.paths import ROOT

EXAMPLES = ROOT / "examples"
SHELL = f"sh {EXAMPLES}/program_agent/solve.sh"
SMALL = [
    "rollout.group_size=2",
    "rollout.batch_groups=1",
    "rollout.max_in_flight=4",
    "rollout.max_new_tokens=8",
    "engine.num_slots=8",
    "eval.num_tasks=2",
    "trainer.advantage=reinforce",
    "steps=1",
]
needs_tools = pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq"
)


def play(env, agent, replies, question="What is 6*7?"):
    task = Task(id="t", data={"question": question, "answer": "42"})
    episode = play_episode(
        env,
        agent,
        ScriptedEngine(replies),
        byte_renderer(),
        options={"task": task},
        params=SamplingParams(max_new_tokens=300),
        timeout_s=30,
    )
    return asyncio.run(episode)


def test_agents_sdk_example_hands_off_and_calls_the_tool():
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'

    def reply(question):
        if "You decide who answers" in question.text:
            return call % ("transfer_to_calculator", "{}")
        if "42" in question.text:
            return "It is \\boxed{42}."
        return call % ("python", '{"code": "print(6*7)"}')

    agent = OpenAIAgentsAgent(f"{EXAMPLES}/openai_agents_math.py:build")
    trajectory = play(TirEnv(), agent, reply)
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.reward == 1.0
    assert len(trajectory.branches) == 2


def test_black_box_example_takes_the_majority_answer():
    replies = iter(["\\boxed{42}", "\\boxed{7}", "It is \\boxed{42}"])
    agent = OpenAIFunctionAgent(f"{EXAMPLES}/black_box_agent.py:solve")
    trajectory = play(MathEnv(), agent, lambda question: next(replies))
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.reward == 1.0
    assert len(trajectory.branches) == 3
    assert len((EXAMPLES / "black_box_agent.py").read_text().splitlines()) <= 40


@needs_tools
def test_shell_program_example_asks_twice():
    trajectory = play(MathEnv(), ProgramAgent(SHELL), ["Hm, \\boxed{41}?", "No: \\boxed{42}."])
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.reward == 1.0
    assert (len(trajectory.branches), len(trajectory.turns)) == (1, 2)


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        (
            "tir",
            [
                "agent.id=openai_agents",
                f"agent.kwargs.build={EXAMPLES}/openai_agents_math.py:build",
            ],
        ),
        (
            "math",
            ["agent.id=openai", f"agent.kwargs.function={EXAMPLES}/black_box_agent.py:solve"],
        ),
        pytest.param(
            "math", ["agent.id=program", f"agent.kwargs.command={SHELL}"], marks=needs_tools
        ),
    ],
    ids=["openai_agents", "black_box", "program"],
)
def test_agent_examples_train(env, settings, tiny_policy, tmp_path):
    torch.set_num_threads(1)
    config = load_config(None, [*SMALL, *settings, f"env.id={env}", f"engine.model={tiny_policy}"])
    train(config, run_dir=tmp_path / "run")
    (row,) = RunDir(tmp_path / "run").read_metrics()
    assert row["rollout/failures/agent_error"] == 0
    trajectories = list(RunDir(tmp_path / "run").read_trajectories(1))
    assert len(trajectories) == 2
    assert {t.agent_id for t in trajectories} == {config.agent.id}
    assert all(t.num_policy_tokens for t in trajectories)


def test_online_program_example_trains(tiny_policy, tmp_path):
    torch.set_num_threads(1)
    out = tmp_path / "run"
    settings = ["env.id=online", f"engine.model={tiny_policy}", "rollout.group_size=4"]
    config = load_config(None, [*SMALL[1:], *settings, "steps=3"])
    programs = []

    def follow():
        while not (out / "gateway.json").exists():
            time.sleep(0.05)
        programs.append(
            subprocess.Popen(
                [sys.executable, EXAMPLES / "online_program.py", out / "gateway.json"],
                stderr=subprocess.PIPE,
                env=os.environ,
            )
        )

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    train(config, run_dir=out)
    follower.join()
    (program,) = programs
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors.decode()
    directory = RunDir(out)
    assert len(list(directory.read_metrics())) == 3
    for step in (1, 2, 3):
        prompts = {t.messages[0]["content"] for t in directory.read_trajectories(step)}
        assert len(prompts) == 1  # all siblings had the same task
