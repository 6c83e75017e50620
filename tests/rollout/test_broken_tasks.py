"""A task whose own verifier fails three times in a row is dropped from the run."""

import asyncio

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.errors import FailureBudgetError, TaskError
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.tasks.base import TaskSource
from areal_gym.types import Task

RENDERER = byte_renderer()


class Few(TaskSource):
    def num_tasks(self, split):
        return 4

    def draw(self, rng, split):
        return self.at(int(rng.integers(4)), split)

    def at(self, index, split):
        return Task(id=f"task-{index}", data={"index": index}, split=split)


def env_with(fails):
    """Return an environment whose verifier fails where `fails(index of task, episode)` says so."""

    class Tasks(TextEnv):
        counts = dict.fromkeys(range(4), 0)

        def __init__(self):
            super().__init__(tasks=Few())

        def first_messages(self, task):
            return [{"role": "user", "content": task.id}]

        async def respond(self, message):
            index = self.task.data["index"]
            self.counts[index] += 1
            if fails(index, self.counts[index]):
                raise TaskError(f"task-{index}, verifier: no reward")
            return Response(reward=1.0, is_terminated=True)

    return Tasks


def play(env, num_batches=20, state=None, **config):
    engine, dropped = ScriptedEngine(["10"]), []
    settings = {"batch_groups": 2, "group_size": 2, "max_new_tokens": 40, "max_failure_rate": 0.9}
    runner = RolloutRunner(
        EpisodeSetup(env, ChatAgent(), engine, RENDERER),
        RolloutConfig(**settings, **config),
        on_dropped_task=lambda *facts: dropped.append(facts),
        state=state,
    )

    async def run():
        groups = []
        async with asyncio.timeout(60), runner:
            for _ in range(num_batches):
                groups += await runner.next_batch()
                await engine.publish([], engine.policy_version + 1)
            return groups, runner.state()

    groups, state = asyncio.run(run())
    return [group.task.id for group in groups], dropped, runner.stats(), state


def test_a_task_whose_verifier_fails_three_times_is_dropped_and_named():
    env = env_with(lambda index, episode: index == 2)
    played, dropped, stats, state = play(env)
    assert dropped == [("task-2", "task-2, verifier: no reward")]
    assert "task-2" not in played
    assert len(set(played)) == 3
    assert 3 <= env.counts[2] < 3 + 8  # what was under way when the third one failed
    assert (stats.num_dropped_tasks, state["dropped_tasks"]) == (1, ["task-2"])
    assert set(stats.num_failures) == {"task_error"}
    # A run that goes on does not ask for it again.
    before = env.counts[2]
    assert "task-2" not in play(env, state=state)[0]
    assert env.counts[2] == before


def test_a_verifier_that_fails_now_and_then_keeps_its_task():
    played, dropped, stats, state = play(env_with(lambda index, episode: episode % 3 == 0))
    assert not dropped
    assert "dropped_tasks" not in state
    assert len(set(played)) == 4
    assert stats.num_failures["task_error"] >= 4


def test_a_run_whose_tasks_are_all_broken_ends_with_the_last_error():
    with pytest.raises(FailureBudgetError, match=r"4 were dropped.*verifier: no reward"):
        play(env_with(lambda index, episode: True))
