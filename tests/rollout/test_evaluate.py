import asyncio
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import areal_gym
from areal_gym.agents.chat import ChatAgent
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.errors import EngineError, FailureBudgetError, NothingToDoError, UsageError
from areal_gym.utils.statistics import pass_at_k_interval, wilson_interval
from tests._support.evaluation import evaluate
from tests._support.sums_env import CALL, Sums

RENDERER = byte_renderer()


def measure(replies, env=Sums, **options):
    engine = replies if isinstance(replies, ScriptedEngine) else ScriptedEngine(replies)
    return asyncio.run(evaluate(env, ChatAgent(), engine, RENDERER, **options))


def number_of(question):
    return int(question.text.split("What is ")[1].split(" ")[0])


def right_for_even_tasks(question):
    return "10" if number_of(question) % 2 == 0 else "no idea"


def test_evaluation_report_counts_tasks_samples_and_scores():
    seen, progress = [], []
    report = measure(
        right_for_even_tasks,
        num_tasks=50,
        num_samples=4,
        on_trajectory=seen.append,
        on_progress=lambda *step: progress.append(step),
    )
    assert (report.num_tasks, report.num_episodes, report.num_failed) == (50, 200, 0)
    assert set(report.pass_at_k) == {1, 2, 4}
    assert all(p.mean == 0.5 for p in report.pass_at_k.values())  # samples of a task are equal
    assert report.pass_hat_k == {1: 0.5, 2: 0.5, 4: 0.5}
    assert report.pass_at_1.low == pytest.approx(wilson_interval(25, 50).low)  # 50 tasks, not 200
    assert report.reward == report.reward_parts["answer"] == 0.5
    assert report.stop_reasons == {"completed": 200}
    assert report.mean_turns == 1.0
    assert report.policy_versions == (0,)
    assert {t.task.split for t in seen} == {"test"}
    assert sorted({int(t.task.id) for t in seen}) == list(range(50))
    assert len({t.id for t in seen}) == 200
    assert progress == [(done, 200) for done in range(1, 201)]
    row = json.loads(json.dumps(report.to_dict()))
    assert row["pass@4"] == row["pass^4"] == 0.5
    text = report.to_text()
    assert "pass@4" in text
    assert "pass^4" in text
    assert "completed" in text
    assert text.isascii()


def test_greedy_evaluation_samples_at_temperature_zero():
    temperatures = []

    def reply(question):
        temperatures.append(question.params.temperature)
        return "10"

    report = measure(reply, num_tasks=3, temperature=0.0)
    assert temperatures == [0.0] * 3
    assert "greedy" in report.to_text()


def test_evaluation_excludes_and_counts_failures():  # trap 5
    def reply(question):
        if number_of(question) % 4 == 1:
            raise EngineError("no answer")
        return "10"

    report = measure(reply, num_tasks=40, num_samples=2, max_retries=0)
    assert (report.num_tasks, report.num_failed) == (30, 20)
    assert report.pass_at_1.mean == 1.0
    assert report.stop_reasons == {"completed": 60, "engine_error": 20}
    assert report.errors == {"no answer": 20}
    assert "20 x no answer" in report.to_text()


@pytest.mark.parametrize(("max_context", "num_unasked"), [(20, 4), (4096, 0)])
def test_evaluation_reports_prompts_beyond_the_context(max_context, num_unasked):
    report = measure(ScriptedEngine(lambda _: "10", max_context=max_context), num_tasks=4)
    assert report.num_unasked == num_unasked
    assert ("engine.max_context" in report.to_text()) == bool(num_unasked)


def test_evaluation_seed_changes_samples_not_tasks():
    seeds, tasks = [], []

    def reply(question):
        seeds.append(question.params.seed)
        return "10"

    for seed in (0, 0, 1):
        measure(
            reply,
            num_tasks=5,
            seed=seed,
            max_in_flight=1,
            on_trajectory=lambda t: tasks.append(t.task.id),
        )
    assert tasks[:5] == tasks[5:10] == tasks[10:]
    assert seeds[:5] == seeds[5:10]
    assert set(seeds[:5]).isdisjoint(seeds[10:])


def test_broken_engine_ends_the_evaluation():
    def gone(question):
        raise EngineError("no answer")

    for num_tasks in (3, 200):
        with pytest.raises(FailureBudgetError, match="no answer"):
            measure(gone, num_tasks=num_tasks)


def test_small_split_is_played_whole_and_empty_split_refused():
    class Few(Sums):
        def num_tasks(self, split):
            return 7 if split == "test" else 0

    assert measure(["10"], Few, num_tasks=100).num_tasks == 7
    with pytest.raises(NothingToDoError, match="train"):
        measure(["10"], Few, split="train")

    class Picky(Sums):
        def sample_task(self, rng, options):
            raise UsageError("no such split")

    with pytest.raises(UsageError, match="no such split"):
        measure(["10"], Picky)


def test_failing_callback_ends_the_evaluation_with_its_error():
    def disk_full(trajectory):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        measure(ScriptedEngine([CALL, "10"]), num_tasks=20, on_trajectory=disk_full)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.sampled_from([1, 2, 4]))
def test_confidence_interval_contains_the_estimate(successes, k):
    interval = pass_at_k_interval([(4, c) for c in successes], k, num_samples=4)
    assert 0 <= interval.low <= interval.mean + 1e-9
    assert interval.mean <= interval.high + 1e-9 <= 1 + 2e-9


def test_confidence_interval_uses_independent_samples():
    # One sample each: the plain score interval.
    single = pass_at_k_interval([(1, 1)] * 30 + [(1, 0)] * 70, 1, num_samples=1)
    assert single == pytest.approx(wilson_interval(30, 100))
    # Tasks that differ only by chance: as informative as all samples.
    assert pass_at_k_interval([(4, 2)] * 25, 1, num_samples=4) == pytest.approx(
        wilson_interval(50, 100)
    )
    assert math.isnan(pass_at_k_interval([(1, 1)], 2, num_samples=2).mean)


def test_mix_is_reported_per_environment():
    def make():
        envs = [{"id": "math", "weight": 3}, {"id": "countdown", "weight": 1}]
        return areal_gym.make("mix", envs=envs)

    def right_for_countdown(question):
        return "\\boxed{1+1}" if "Use each of" in question.text else "\\boxed{-99999}"

    seen = []
    report = measure(
        right_for_countdown, make, num_tasks=40, success_reward=0.1, on_trajectory=seen.append
    )
    assert {t.env_id for t in seen} == {"math", "countdown"}
    scores = {name: (s.num_tasks, s.pass_at_1.mean) for name, s in report.by_env.items()}
    assert scores == {"countdown": (10, 1.0), "math": (30, 0.0)}
    assert report.pass_at_1.mean == 0.25
    row = json.loads(json.dumps(report.to_dict()))
    assert row["by_env"]["countdown"]["pass@1"] == 1.0
    assert "pass@1 in countdown" in report.to_text()
    assert measure("10", num_tasks=2).by_env == {}


def test_mean_reward_has_an_interval_over_tasks():
    report = areal_gym.evaluate(lambda messages: r"\boxed{7}", "math", n=8, k=2)
    numbers = report.to_dict()
    assert numbers["reward_low"] <= numbers["reward"] <= numbers["reward_high"]
    few = areal_gym.evaluate(lambda messages: r"\boxed{7}", "math", n=2).to_dict()
    assert few["reward_low"] is None  # two tasks say nothing
