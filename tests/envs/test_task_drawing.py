"""Tasks are drawn without a reset, and are those that a reset would begin with."""

import asyncio

import numpy as np
import pytest

import areal_gym
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.contamination import find_contamination
from areal_gym.envs.task_drawing import draw_task
from areal_gym.errors import EnvError, UsageError
from areal_gym.rollout.curriculum import SuccessRateCurriculum
from areal_gym.tasks import open_tasks
from areal_gym.tasks.base import Draft
from areal_gym.types import Task

MIX = {"envs": [{"id": "tir", "weight": 2}, {"id": "math"}]}
ENVS = [("math", {}), ("tir", {}), ("code", {}), ("countdown", {}), ("search", {}), ("mix", MIX)]


@pytest.mark.parametrize(("id", "kwargs"), [*ENVS, ("tau2/mock", {}), ("online", {})])
def test_drawn_tasks_are_those_of_a_reset(id, kwargs):
    env = areal_gym.make(id, **kwargs)
    for seed in range(5):
        for options in ({"split": "train"}, {"split": "test"}, {"split": "test", "index": seed}):
            drawn = asyncio.run(draw_task(env, seed, options))
            env.reset(seed=seed, options=options)
            assert drawn == env.task
    env.close()


class Numbers(TextEnv):
    """Draws from `self.np_random`, and counts how often an episode was opened."""

    num_opened = 0

    def sample_task(self, rng, options):
        return Task(id=str(self.np_random.integers(10**9)), data={})

    def first_messages(self, task):
        self.num_opened += 1
        return [{"role": "user", "content": task.id}]

    async def respond(self, message):
        return Response()


class OwnReset(Numbers):
    def reset(self, *, seed=None, options=None):
        self.num_resets = getattr(self, "num_resets", 0) + 1
        return super().reset(seed=seed, options=options)

    async def areset(self, *, seed=None, options=None):
        return self.reset(seed=seed, options=options)


def test_an_episode_under_way_is_not_disturbed():
    env = Numbers()
    env.reset(seed=3)
    before = env.task, list(env.messages), env.np_random.bit_generator.state
    drawn = asyncio.run(draw_task(env, 7, {}))
    assert (env.task, list(env.messages), env.np_random.bit_generator.state) == before
    assert env.num_opened == 1
    env.reset(seed=7)
    assert env.task == drawn


def test_an_environment_with_a_reset_of_its_own_is_reset():
    env = OwnReset()
    drawn = asyncio.run(draw_task(env, 7, {}))
    assert (env.num_resets, env.task) == (1, drawn)


def test_a_failing_sample_task_is_named():
    class Broken(Numbers):
        def sample_task(self, rng, options):
            raise KeyError("gone")

    with pytest.raises(EnvError, match=r"Broken\.sample_task failed: KeyError"):
        asyncio.run(draw_task(Broken(), 0, {}))


ROWS = [{"question": f"How much is {n} and {n}?", "answer": str(2 * n)} for n in range(30)]


def draft(row):
    return Draft(row.data["question"], row.data)


class Answers(TextEnv):
    """All that an author writes for an environment that is given its tasks."""

    max_turns = 1

    def first_messages(self, task):
        return [{"role": "user", "content": task.data["question"]}]

    async def respond(self, message):
        return Response(reward=float(message["content"] == self.task.data["answer"]))

    def gold_action(self):
        return self.task.data["answer"]


def test_an_environment_is_given_its_tasks():
    source = open_tasks(ROWS, draft)
    env = Answers(tasks=source)
    assert env.tasks is source
    assert env.num_tasks("train") + env.num_tasks("test") == 30
    env.reset(options={"split": "train", "index": 4})
    assert env.task == source.at(4, "train")
    assert env.step(env.gold_action()).reward == 1.0
    with pytest.raises(UsageError, match=r"has .* such tasks"):
        env.reset(options={"split": "train", "index": 30})


def test_any_environment_shows_its_tasks_as_a_source():
    env = areal_gym.make("tau2/mock")
    source = env.tasks
    assert source.num_tasks("train") == env.num_tasks("train")
    assert source.at(3, "test") == source.at(3, "test") != source.at(4, "test")
    assert source.draw(np.random.default_rng(0), "train").split == "train"


def test_an_attribute_called_tasks_is_the_authors_own():
    class Listed(Numbers):
        def __init__(self):
            super().__init__()
            self.tasks = ["mine"]

    env = Listed()
    env.reset(seed=1)
    assert env.tasks == ["mine"]


def test_curricula_and_contamination_checks_take_sources():
    leaked = {**ROWS[0], "question": ROWS[0]["question"].upper()}
    source = open_tasks({"data": ROWS, "test": [{**leaked, "x": 1}]}, draft)
    found = find_contamination(source)
    assert (found.num_train, found.num_heldout, found.num_same) == (30, 1, 1)
    curriculum = SuccessRateCurriculum()
    curriculum.prepare(source, "train")
    import random

    assert curriculum.choose(random.Random(0))["index"] < 30
