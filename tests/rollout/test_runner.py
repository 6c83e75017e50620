import asyncio
import itertools
import json
import random

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.errors import (
    DataError,
    EngineError,
    EnvError,
    FailureBudgetError,
    InfrastructureError,
)
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from tests._support.evaluation import evaluate
from tests._support.sums_env import CALL, RecordingEngine, Sums

RENDERER = byte_renderer()


def runner_of(engine, env=Sums, *, seed=0, state=None, on_trajectory=None, **config):
    config = {"batch_groups": 3, "group_size": 4, "max_new_tokens": 40, **config}
    return RolloutRunner(
        EpisodeSetup(env, ChatAgent(), engine, RENDERER),
        RolloutConfig(**config),
        seed=seed,
        state=state,
        on_trajectory=on_trajectory,
    )


async def batches(runner, engine, num_batches):
    """A trainer that only counts versions."""
    taken = []
    async with asyncio.timeout(20), runner:
        for _ in range(num_batches):
            taken.append(await runner.next_batch())
            await engine.publish([], engine.policy_version + 1)
    assert runner.in_flight.episodes == 0
    assert len(asyncio.all_tasks()) == 1  # trap 35
    return taken


def rows(taken):
    return [[(t.id, t.task.id, t.token_ids) for t in g] for batch in taken for g in batch]


class SlowEngine(RecordingEngine):
    """Takes a random time for each turn, different in each run."""

    def __init__(self, seed, **options):
        super().__init__(**options)
        self.rng = random.Random(seed)

    async def generate(self, prompt_ids, params, *, session=None):
        await asyncio.sleep(self.rng.choice([0, 0, 0.001, 0.005]))
        return await super().generate(prompt_ids, params, session=session)


def test_synchronous_batches_are_reproducible_token_for_token():
    expected = None
    for max_in_flight, noise in itertools.product((1, 5, 64), (0, 1)):
        engine = SlowEngine(noise)
        taken = asyncio.run(
            batches(runner_of(engine, max_in_flight=max_in_flight, seed=7), engine, 3)
        )
        for version, batch in enumerate(taken):
            assert [g.id for g in batch] == [f"g{3 * version + i:06d}" for i in range(3)]
            assert {v for g in batch for t in g for v in t.policy_versions} == {version}
            assert all(len(g) == 4 and len({t.task.id for t in g}) == 1 for g in batch)
        expected = expected or rows(taken)
        assert rows(taken) == expected
    other = asyncio.run(batches(runner_of(engine := SlowEngine(0), seed=8), engine, 3))
    assert {t for g in rows(other) for _, t, _ in g}.isdisjoint(
        t for g in expected for _, t, _ in g
    )


def test_starting_1000_episodes_does_not_block_the_event_loop():
    async def watch():
        engine = ScriptedEngine(["10"], latency_s=60)
        runner = runner_of(engine, batch_groups=250, max_in_flight=1000)
        async with runner:
            trainer = asyncio.create_task(runner.next_batch())
            in_flight = [0]
            while in_flight[-1] < 1000:
                await asyncio.sleep(0)
                in_flight.append(runner.in_flight.episodes)
            trainer.cancel()
        return max(after - before for before, after in itertools.pairwise(in_flight))

    assert 0 < asyncio.run(watch()) <= 64


def test_siblings_share_the_task_and_differ_in_tokens():
    engine = RecordingEngine()
    ((*_, group),) = asyncio.run(batches(runner_of(engine), engine, 1))
    assert len({t.token_ids for t in group}) > 1
    assert len({t.seed for t in group}) == 4


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_staleness_is_bounded_under_random_schedules(max_staleness):
    async def train(seed):
        rng = random.Random(seed)
        engine = SlowEngine(seed)
        runner = runner_of(engine, max_staleness=max_staleness, max_in_flight=16)
        lags, indices = [], []
        async with asyncio.timeout(20), runner:
            for _ in range(12):
                batch = await runner.next_batch()
                version = engine.policy_version
                lags += [version - v for g in batch for t in g for v in t.policy_versions]
                indices += [g.id for g in batch]
                await asyncio.sleep(rng.choice([0, 0.002, 0.01]))
                await engine.publish([], version + 1)
        assert len(set(indices)) == len(indices) == 36  # no group is trained on twice
        return lags

    lags = [lag for seed in range(4) for lag in asyncio.run(train(seed))]
    assert max(lags) <= max_staleness
    assert max_staleness == 0 or max(lags) > 0  # it does run ahead


def test_stale_groups_are_dropped_and_replaced():
    async def scenario():
        engine = ScriptedEngine(["10"])
        runner = runner_of(engine, max_staleness=1)
        async with asyncio.timeout(10), runner:
            await runner.next_batch()
            await asyncio.sleep(0.05)  # the next batch is complete
            assert runner.stats().groups_ready == 3
            await engine.publish([], 7)  # another trainer went far ahead
            batch = await runner.next_batch()
        assert all(t.policy_versions == (7,) for g in batch for t in g)
        assert runner.stats().num_groups_stale >= 3

    asyncio.run(scenario())


def test_runner_runs_ahead_up_to_max_staleness():
    async def scenario():
        engine = ScriptedEngine(["10"])
        runner = runner_of(engine, max_staleness=2, max_in_flight=4)
        async with asyncio.timeout(10), runner:
            await runner.next_batch()
            for version in (0, 1):
                while runner.stats().groups_ready < 6 + 3 * version:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)  # and no further
                assert runner.stats().groups_ready == 6 + 3 * version  # 3 were taken
                assert runner.stats().episodes_in_flight == 0
                # The runner notices the new version without being called.
                await engine.publish([], version + 1)

    asyncio.run(scenario())


class Flaky(Sums):
    """Fails where `fails(env)` is true; otherwise depends on task and turn only."""

    fails = staticmethod(lambda env: False)

    async def respond(self, message):
        if self.fails(self):
            raise RuntimeError("the data base is away")
        return await super().respond(message)


def flaky(fails):
    return type("Flaky", (Flaky,), {"fails": staticmethod(fails)})


def test_failed_members_are_excluded_and_counted():  # traps 2 and 5
    seen = []

    def fails(env):  # by the episode's own seed: about half of them
        return env.np_random_seed % 2 == 0

    engine = ScriptedEngine(["10"])
    runner = runner_of(
        engine, flaky(fails), max_retries=0, max_failure_rate=0.9, on_trajectory=seen.append
    )
    taken = asyncio.run(batches(runner, engine, 4))
    groups = [g for batch in taken for g in batch]
    assert len(groups) == 12
    assert all(2 <= len(g) <= 4 and len(g) + g.num_failed == 4 for g in groups)
    assert any(g.num_failed for g in groups)
    assert all(t.reward == 1.0 for g in groups for t in g)  # a failure is not a reward of 0
    stats = runner.stats()
    assert stats.num_failures == {"env_error": sum(t.stop_reason.is_failure for t in seen)}
    assert stats.num_groups_failed > 0
    assert stats.num_retries == 0


def test_failed_episode_is_retried():
    tried = set()

    def fails(env):
        is_first = env.task.id not in tried
        tried.add(env.task.id)
        return is_first

    engine = ScriptedEngine(["10"])
    runner = runner_of(engine, flaky(fails), max_retries=1)
    taken = asyncio.run(batches(runner, engine, 2))
    assert all(len(g) == 4 and g.num_failed == 0 for batch in taken for g in batch)
    assert runner.stats().num_retries == runner.stats().num_failures["env_error"] == 6
    assert sum(t.id.endswith("-retry1") for batch in taken for g in batch for t in g) == 6


def gone(question):
    raise EngineError("no answer from the engine")


def test_failing_engine_stops_the_run_and_is_named():  # trap 9
    engine = ScriptedEngine(gone)
    with pytest.raises(FailureBudgetError) as caught:
        asyncio.run(batches(runner_of(engine, batch_groups=16), engine, 1))
    assert "engine_error" in str(caught.value)
    assert "no answer from the engine" in str(caught.value)
    assert caught.value.hints


def test_run_without_failure_budget_stops_when_every_group_fails():
    engine = ScriptedEngine(gone)
    runner = runner_of(engine, max_failure_rate=1.0, batch_groups=2)
    with pytest.raises(FailureBudgetError, match="8 groups in a row"):
        asyncio.run(batches(runner, engine, 1))


def test_environment_without_a_task_is_a_failure():
    class Empty(Sums):
        def sample_task(self, rng, options):
            raise EnvError("no task left")

    engine = ScriptedEngine(["10"])
    with pytest.raises(FailureBudgetError, match="no task left"):
        asyncio.run(batches(runner_of(engine, Empty), engine, 1))


def remote_sums(slow_reset=None):
    """Return `Sums` with a `prepare` that waits, for ever in the reset of that number."""

    class RemoteSums(Sums):
        num_resets = num_preparing = max_preparing = 0

        async def prepare(self, seed, options):
            cls = RemoteSums
            cls.num_resets += 1
            cls.num_preparing += 1
            cls.max_preparing = max(cls.max_preparing, cls.num_preparing)
            await asyncio.sleep(0.01 if cls.num_resets != slow_reset else 3600)
            cls.num_preparing -= 1

    return RemoteSums


def test_slow_remote_reset_does_not_block_other_episodes():
    env = remote_sums(slow_reset=3)

    async def play():
        engine = ScriptedEngine(["10"])
        runner = runner_of(engine, env, max_staleness=4, max_in_flight=24)
        async with asyncio.timeout(20), runner:
            taken = [await runner.next_batch() for _ in range(4)]
            assert runner.stats().groups_running  # the one that still waits for its task
            assert 2 in runner.state()["unfinished"]
        return taken

    taken = asyncio.run(play())
    indices = [int(group.id[1:]) for batch in taken for group in batch]
    assert len(indices) == 12
    assert 2 not in indices
    assert env.max_preparing > 4


def test_evaluation_resets_remote_environments_concurrently():
    env, engine = remote_sums(), ScriptedEngine(["10"])
    settings = {"num_tasks": 64, "max_in_flight": 64, "max_new_tokens": 40}
    report = asyncio.run(evaluate(env, ChatAgent(), engine, RENDERER, **settings))
    assert report.num_episodes == 64
    assert env.max_preparing == 64


def test_reset_that_never_returns_times_out():
    class Silent(Sums):
        async def prepare(self, seed, options):
            await asyncio.sleep(3600)

    engine = ScriptedEngine(["10"])
    runner = runner_of(engine, Silent, episode_timeout_s=0.01)
    with pytest.raises(FailureBudgetError, match="timeout"):
        asyncio.run(batches(runner, engine, 1))


def test_data_errors_and_full_disks_reach_the_trainer():
    class NoData(Sums):
        def sample_task(self, rng, options):
            raise DataError("row 7 is broken")

    engine = ScriptedEngine(["10"])
    with pytest.raises(DataError, match="row 7"):
        asyncio.run(batches(runner_of(engine, NoData), engine, 1))

    def disk_full(trajectory):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(batches(runner_of(engine, on_trajectory=disk_full), engine, 1))


def test_closing_cancels_episodes_and_wakes_the_trainer():
    async def scenario():
        engine = ScriptedEngine(["10"], latency_s=60)
        runner = runner_of(engine)
        waiting = asyncio.create_task(runner.next_batch())
        await asyncio.sleep(0.01)
        stats = runner.stats()
        assert stats.episodes_in_flight == stats.waiting_on_engine == 12
        assert stats.groups_running == 3
        await runner.aclose()
        await runner.aclose()
        with pytest.raises(InfrastructureError, match="closed"):
            await waiting
        assert runner.in_flight.episodes == 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_cancelling_the_trainer_keeps_the_runner_usable():
    async def scenario():
        engine = ScriptedEngine(["10"], latency_s=0.02)
        async with runner_of(engine) as runner:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(runner.next_batch(), 0.005)
            assert len(await runner.next_batch()) == 3

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_slow_episodes_time_out_and_others_continue():
    engine = ScriptedEngine(["10"], latency_s=lambda q: 60 if q.params.seed % 5 == 0 else 0)
    runner = runner_of(engine, episode_timeout_s=0.05)
    taken = asyncio.run(batches(runner, engine, 2))
    assert len(taken) == 2
    assert set(runner.stats().num_failures) == {"timeout"}


def test_resumed_runner_continues_token_for_token():  # trap 27
    engine = RecordingEngine()
    whole = asyncio.run(batches(runner_of(engine), engine, 4))

    async def interrupted():
        engine = RecordingEngine()
        runner = runner_of(engine)
        async with runner:
            taken = []
            for _ in range(2):
                taken.append(await runner.next_batch())
                await engine.publish([], engine.policy_version + 1)
        return taken, json.loads(json.dumps(runner.state()))

    async def resumed(state):
        engine = RecordingEngine()
        await engine.publish([], 2)
        return await batches(runner_of(engine, state=state), engine, 2)

    first, state = asyncio.run(interrupted())
    assert rows(first + asyncio.run(resumed(state))) == rows(whole)
    assert rows(first + asyncio.run(resumed(None))) == rows(whole)


def test_groups_in_flight_at_an_interruption_are_replayed():
    async def scenario():
        engine = ScriptedEngine(["10"])
        runner = runner_of(engine, max_staleness=2, max_in_flight=4)
        async with runner:
            taken = await runner.next_batch()
            await engine.publish([], 1)
            await asyncio.sleep(0.02)
        state = runner.state()
        assert len(state["unfinished"]) == state["next_group"] - 3 > 0
        engine = ScriptedEngine(["10"])
        await engine.publish([], 1)
        async with runner_of(engine, max_staleness=2, state=state) as runner:
            taken += await runner.next_batch()
        assert [g.id for g in taken] == [f"g{i:06d}" for i in range(6)]

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_evaluation_runs_beside_training_on_one_engine():  # trap 21
    async def scenario():
        engine = ScriptedEngine([CALL, "10"], latency_s=0.001)
        async with runner_of(engine, max_staleness=1) as runner:
            before = await runner.next_batch()
            report, batch = await asyncio.gather(
                evaluate(Sums, ChatAgent(), engine, RENDERER, num_tasks=20, max_in_flight=7),
                runner.next_batch(),
            )
        assert report.num_episodes == 20
        assert report.pass_at_1.mean == 1.0
        assert len(batch) == len(before) == 3

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_environments_are_reused():
    made = []

    def make():
        made.append(Sums())
        return made[-1]

    engine = ScriptedEngine(["10"])
    asyncio.run(batches(runner_of(engine, make, max_in_flight=5), engine, 5))
    assert len(made) <= 5
