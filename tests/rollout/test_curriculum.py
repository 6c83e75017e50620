import asyncio
import json
import random
from collections import Counter

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.math import MathEnv
from areal_gym.envs.tir import TirEnv
from areal_gym.errors import ConfigError, UsageError
from areal_gym.plugins import Candidate, PluginManager, Registry
from areal_gym.rollout import plugin
from areal_gym.rollout.curriculum import SuccessRateCurriculum
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.filters import ZeroVarianceFilter
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.types import Task
from tests._support.sums_env import Sums


class Levels(Sums):
    """Tasks with a level, which decides how often `Skilled` is right."""

    difficulties = ("easy", "medium", "hard")

    def sample_task(self, rng, options):
        number = int(rng.integers(10**9))
        level = options["difficulty"]
        return Task(id=f"{level}/{number}", data={"number": number, "level": level})

    def first_messages(self, task):
        return [{"role": "user", "content": f"{task.data['level']}: {task.data['number']} + 7?"}]


class Skilled(ScriptedEngine):
    """Answers right always, half the time or never, by level, after a random time."""

    def __init__(self):
        super().__init__(self.answer, latency_s=lambda q: random.choice([0, 0.001]))

    def answer(self, question):
        share = 1.0 if "easy" in question.text else 0.5 if "medium" in question.text else 0.0
        return "10" if random.Random(question.params.seed).random() < share else "11"


def runner_of(engine, curriculum, env=Levels, *, state=None, filters=None, **config):
    config = {"batch_groups": 4, "group_size": 4, "max_new_tokens": 40, **config}
    return RolloutRunner(
        EpisodeSetup(env, ChatAgent(), engine, byte_renderer()),
        RolloutConfig(**config),
        state=state,
        curriculum=curriculum,
        filters=filters or {},
    )


async def batches(runner, engine, num_batches):
    taken = []
    async with asyncio.timeout(20), runner:
        for _ in range(num_batches):
            taken.append(await runner.next_batch())
            await engine.publish([], engine.policy_version + 1)
    return taken, json.loads(json.dumps(runner.state()))


def levels(taken):
    return Counter(g.task.data["level"] for batch in taken for g in batch)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_curriculum_prefers_medium_and_keeps_other_levels(max_staleness):
    engine = Skilled()
    runner = runner_of(engine, SuccessRateCurriculum(), max_staleness=max_staleness)
    taken, _ = asyncio.run(batches(runner, engine, 30))
    late = levels(taken[10:])
    assert late["medium"] > 0.6 * late.total()
    assert late["easy"] > 0
    assert late["hard"] > 0


def test_curriculum_lowers_the_number_of_filtered_groups():
    def num_rejected(curriculum):
        engine = Skilled()
        filters = {"zero-variance": ZeroVarianceFilter()}
        runner = runner_of(engine, curriculum, filters=filters or {})
        taken, _ = asyncio.run(batches(runner, engine, 15))
        assert set(levels(taken)) == {"medium"}
        return runner.stats().num_groups_rejected["zero-variance/all-equal"]

    # explore=1 draws all levels alike.
    assert num_rejected(SuccessRateCurriculum()) < 0.6 * num_rejected(
        SuccessRateCurriculum(explore=1.0)
    )


def test_synchronous_curriculum_is_independent_of_finishing_order():
    def play(max_in_flight):
        engine = Skilled()
        runner = runner_of(
            engine,
            SuccessRateCurriculum(),
            max_in_flight=max_in_flight,
            filters={"zero-variance": ZeroVarianceFilter()},
        )
        taken, _ = asyncio.run(batches(runner, engine, 6))
        return [[(g.id, g.task.id) for g in batch] for batch in taken]

    assert play(64) == play(64) == play(5) == play(1)


@pytest.mark.parametrize("num_before", [1, 3])
def test_curriculum_state_survives_resume(num_before):
    def ids(taken):
        return [[(g.id, g.task.id) for g in batch] for batch in taken]

    engine = Skilled()
    whole, _ = asyncio.run(batches(runner_of(engine, SuccessRateCurriculum()), engine, 6))
    engine = Skilled()
    runner = runner_of(engine, SuccessRateCurriculum())
    first, state = asyncio.run(batches(runner, engine, num_before))
    engine = Skilled()
    engine.policy_version = num_before
    resumed = runner_of(engine, SuccessRateCurriculum(), state=state)
    rest, _ = asyncio.run(batches(resumed, engine, 6 - num_before))
    assert ids(first + rest) == ids(whole)


def test_curriculum_uses_task_indices_of_a_finite_environment():
    class Four(Sums):
        def num_tasks(self, split):
            return 4

    engine = ScriptedEngine(lambda q: "10" if "What is 2 " in q.text and q.params.seed % 2 else "1")
    runner = runner_of(engine, SuccessRateCurriculum(), Four)
    taken, _ = asyncio.run(batches(runner, engine, 30))
    chosen = Counter(g.task.data["number"] for batch in taken[10:] for g in batch)
    assert chosen[2] > 0.5 * chosen.total()
    assert set(chosen) == {0, 1, 2, 3}


def test_environment_without_difficulties_is_refused():
    with pytest.raises(ConfigError, match="nothing to choose") as caught:
        runner_of(ScriptedEngine(["10"]), SuccessRateCurriculum(), Sums)
    assert any("rollout.curriculum=null" in hint for hint in caught.value.hints)


@pytest.mark.parametrize("wrong", [{"explore": 0.0}, {"explore": 1.5}, {"memory": 0.5}])
def test_wrong_curriculum_arguments_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SuccessRateCurriculum(**wrong)


def test_curriculum_state_round_trips_through_json():
    first = SuccessRateCurriculum()
    first.prepare(Levels(), "train")
    for level, rewards in (("easy", [1, 1]), ("hard", [0, 0]), ("easy", [1, 0])):
        first.observe({"difficulty": level}, rewards)
    second = SuccessRateCurriculum()
    second.prepare(Levels(), "train")
    second.restore(json.loads(json.dumps(first.state())))
    assert all(first.success_rate(arm) == second.success_rate(arm) for arm in Levels.difficulties)
    assert first.success_rate("easy") > 0.5 > first.success_rate("hard")
    assert first.choose(random.Random(3)) == second.choose(random.Random(3))


def test_curricula_are_plugins():
    registry = Registry(PluginManager([Candidate(name="rollout", target=plugin)]))
    assert registry.load("curricula", "success-rate") is SuccessRateCurriculum


@pytest.mark.parametrize("env_class", [TirEnv, MathEnv])
def test_generated_environments_offer_their_levels(env_class):
    env = env_class(level=1)
    assert tuple(env.difficulties) == (1, 2, 3, 4, 5)
    plain = [env.reset(seed=seed)[0] for seed in range(20)]
    assert [env.reset(seed=seed, options={"difficulty": 1})[0] for seed in range(20)] == plain
    hard = [env.reset(seed=seed, options={"difficulty": 5})[0] for seed in range(20)]
    assert hard == [env_class(level=5).reset(seed=seed)[0] for seed in range(20)]
    with pytest.raises(UsageError, match="level"):
        env.reset(options={"difficulty": 9})


def test_curriculum_chooses_file_questions_by_index(tmp_path):
    rows = (json.dumps({"question": f"{n}+1?", "answer": n + 1}) for n in range(50))
    (tmp_path / "q.jsonl").write_text("\n".join(rows))
    env = MathEnv(tasks=tmp_path / "q.jsonl")
    assert not env.difficulties
    curriculum = SuccessRateCurriculum()
    curriculum.prepare(env, "train")
    assert set(curriculum.choose(random.Random(0))) == {"index"}
    with pytest.raises(UsageError, match="no difficulty"):
        env.reset(options={"difficulty": 1})
