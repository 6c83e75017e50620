"""What the starter policy imitates is what the environment would really have answered."""

from __future__ import annotations

import random

import pytest

import areal_gym
from areal_gym.envs.base import Response, TextEnv
from areal_gym.errors import UsageError
from areal_gym.tasks import split_of
from areal_gym.types import Task
from areal_gym.warm_start.demonstrations import (
    TIR,
    demonstrate,
    demonstrators_for,
    perfect_demonstration,
)


def test_demonstration_shares_add_up():
    assert sum(d.share for d in TIR) == pytest.approx(1.0)


@pytest.mark.parametrize("shown_by", [*TIR, None], ids=lambda d: d.id if d else "perfect")
def test_tir_demonstrations_equal_environment_replies(shown_by):
    env = areal_gym.make("tir")
    rng = random.Random(7)
    for seed in range(6):
        env.reset(seed=seed, options={"split": "train"})
        shown = shown_by.play(env, rng) if shown_by else perfect_demonstration(env, rng)
        task = env.task
        env.reset(options={"task": task})
        assert tuple(env.messages) == tuple(shown.first_messages)
        total = 0.0
        for turn, text in enumerate(shown.texts):
            step = env.step(text)
            total += step.reward
            if turn < len(shown.replies):
                contents = [m["content"] for m in step.info["messages"]]
                assert contents == [m["content"] for m in shown.replies[turn]]
        assert step.terminated
        assert total == shown.reward


def test_demonstrations_use_training_tasks_only():
    env = areal_gym.make("tir")
    rng = random.Random(1)
    for _ in range(200):
        demonstrate(env, rng)
        assert env.task.split == "train"
        assert split_of(areal_gym.envs.arithmetic.canonical(env.task.data["expression"])) == "train"


def test_best_demonstrator_makes_mistakes():
    env = areal_gym.make("tir")
    rng = random.Random(2)
    rewards: dict[str, list[float]] = {}
    for _ in range(3000):
        shown = demonstrate(env, rng)
        rewards.setdefault(shown.demonstrator_id, []).append(shown.reward)
    accuracy = {name: sum(found) / len(found) for name, found in rewards.items()}
    assert 0.65 < accuracy["careful"] < 0.80
    assert max(accuracy["hasty"], accuracy["clumsy"]) < 0.40
    average = sum(map(sum, rewards.values())) / 3000
    assert average < 0.35


@pytest.mark.parametrize("env_id", ["math", "countdown"])
def test_gold_policy_demonstrates_other_environments(env_id):
    env = areal_gym.make(env_id)
    rng = random.Random(3)
    rewards = {}
    for _ in range(40):
        shown = demonstrate(env, rng)
        rewards.setdefault(shown.demonstrator_id, []).append(shown.reward)
    assert set(rewards["gold"]) == {1.0}
    assert max(rewards["noop"]) < 1.0


class Mute(TextEnv):
    def sample_task(self, rng, options):
        return Task(id="x", data={})

    def first_messages(self, task):
        return [{"role": "user", "content": "?"}]

    async def respond(self, message):
        return Response(is_terminated=True)


def test_environment_without_gold_policy_is_refused():
    with pytest.raises(UsageError, match="gold_action") as error:
        demonstrators_for(Mute())
    assert "engine.model=" in error.value.hints[0]


@pytest.mark.parametrize("kwargs", [{"tasks": "questions.jsonl"}, {"tools": ["calculator"]}])
def test_other_tir_questions_use_the_gold_policy(kwargs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f'{{"question": "What is {n}+1?", "answer": "{n + 1}"}}\n' for n in range(20))
    (tmp_path / "questions.jsonl").write_text(rows)
    env = areal_gym.make("tir", **kwargs)
    rng = random.Random(7)
    assert [d.id for d in demonstrators_for(env)] == ["gold", "noop"]
    assert {demonstrate(env, rng).reward for _ in range(20)} == {0.0, 1.0}
    assert perfect_demonstration(env, rng).reward == 1.0
