"""What objects look like at a prompt and in a notebook: short, and nothing in them acts."""

from __future__ import annotations

import re

import pytest

import areal_gym
from areal_gym.config import load_config
from areal_gym.envs.math import MathEnv
from areal_gym.types import FinishReason, Group, StopReason, Task, TokenSpan, Trajectory, Turn

HOSTILE = "</pre></div><script>alert(1)</script>\u202eevil\x1b[31m\u200b\ud800"
LONG = HOSTILE * 20_000
TASK = Task(id=HOSTILE, data={HOSTILE: LONG, "b": [LONG] * 3}, split=HOSTILE)
SPAN = TokenSpan(
    origin="policy", token_ids=(7,) * 10_000, logprobs=(-0.1,) * 10_000, policy_version=3
)
TRAJECTORY = Trajectory(
    id=HOSTILE,
    group_id="g",
    task=TASK,
    env_id=HOSTILE,
    spans=(SPAN,),
    turns=(Turn(finish_reason=FinishReason.STOP, reward=0.5, reward_parts={LONG: 0.5}),),
    messages=(
        {"role": "system", "content": HOSTILE},
        {"role": "user", "content": LONG},
        {
            "role": "assistant",
            "content": LONG,
            "reasoning_content": LONG,
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": HOSTILE, "arguments": {HOSTILE: LONG}},
                }
            ],
        },
        {"role": "tool", "content": LONG},
        *({"role": HOSTILE, "content": LONG},) * 500,
    ),
    metrics={f"{HOSTILE}{i}": 1.0 for i in range(500)},
)
FAILED = Trajectory(
    id="t", group_id="g", task=TASK, env_id="e", stop_reason=StopReason.ENV_ERROR, error=LONG
)
GROUP = Group(id=HOSTILE, task=TASK, trajectories=(TRAJECTORY,) * 300, num_failed=2)


def report():
    def policy(messages):
        if len(messages[-1]["content"]) % 2:
            raise RuntimeError(HOSTILE)
        return LONG

    return areal_gym.evaluate(policy, "math", n=20, max_failure_rate=1.0)


def env():
    made = MathEnv()
    made.reset(seed=0)
    made.step(LONG)
    return made


def hostile_run(tmp_path):
    run = areal_gym.RunDir(tmp_path / "<script>alert(1)")
    run.path.mkdir()
    run.save_config("objective: rl\nenv: {id: '<script>'}\ntrainer: {algorithm: '<script>'}\n")
    run.append_metrics({"step": 1, "reward/mean": 0.25, "limited_by": "<script>"})
    return run


OBJECTS = {
    "Task": lambda _: TASK,
    "Trajectory": lambda _: TRAJECTORY,
    "Trajectory failed": lambda _: FAILED,
    "Group": lambda _: GROUP,
    "Rollouts": lambda _: areal_gym.Rollouts((TRAJECTORY, FAILED) * 50, 1.0),
    "EvalReport": lambda _: report(),
    "TextEnv": lambda _: env(),
    "RunDir": hostile_run,
    "RunConfig": lambda _: load_config(
        base={"env": {"id": HOSTILE, "kwargs": {f"{HOSTILE}{i}": LONG for i in range(90)}}}
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_reprs_are_short_and_escaped(name, tmp_path):
    thing = OBJECTS[name](tmp_path)
    assert len(repr(thing)) < 2_000
    html = thing._repr_html_()
    assert len(html) < 1_000_000
    assert "<script" not in html
    assert "&lt;script" in html or name == "TextEnv"
    assert not re.search("[\u202e\u200b\x1b\ud800]", html)
    assert html.count("<div") == html.count("</div>")
    assert html.count("<pre") == html.count("</pre>")
    html.encode()


def test_trajectory_repr_marks_the_writer():
    messages = (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    )
    task = Task(id="gen/17", data={"question": "2+2?"})
    shown = Trajectory(id="t1", group_id="g", task=task, env_id="math", messages=messages)
    classes = re.findall(r'class="message \w+ (\w+)"', shown._repr_html_())
    assert classes == ["prompt", "prompt", "policy", "env", "policy"]
    assert repr(shown) == "<Trajectory t1: math, reward 0, 0 turns, completed>"
    assert repr(task) == "<Task gen/17 (train): {'question': '2+2?'}>"


def test_settings_repr_shows_non_default_values():
    config = load_config(overrides=["rollout.group_size=4", "trainer.algorithm=dapo"])
    shown = repr(config)
    assert "rollout.group_size=4" in shown
    assert "trainer.algorithm=dapo" in shown
    assert "rollout.batch_groups" not in shown
    assert len(config.changed()) < 15
