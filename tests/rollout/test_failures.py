import asyncio

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.errors import EngineError, EnvError, FailureBudgetError
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.failures import FailureBudget
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.types import StopReason
from tests._support.sums_env import Sums
from tests._support.virtual_time import VirtualLoop

GOOD, BAD = StopReason.COMPLETED, StopReason.ENGINE_ERROR


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def record(budget, reason, times=1):
    for _ in range(times):
        budget.record(reason, "no answer" if reason.is_failure else None)


def alternate(budget, num_bad, times):
    for _ in range(times):
        record(budget, BAD, num_bad)
        record(budget, GOOD)


def test_run_without_success_stops_when_the_budget_is_spent():
    budget = FailureBudget(0.5, window=64)
    record(budget, BAD, 32)
    assert budget.pause_s == 0
    with pytest.raises(FailureBudgetError, match=r"33 of the last 33 .*33 engine_error.*no answer"):
        record(budget, BAD)


def test_failure_rate_counts_failures_among_successes():
    budget = FailureBudget(0.5, window=64)
    alternate(budget, 1, times=200)
    with pytest.raises(FailureBudgetError) as caught:
        alternate(budget, 2, times=60)
    assert any("engine alive" in hint for hint in caught.value.hints)


def test_outage_is_waited_for_and_counts_once():
    budget = FailureBudget(0.5, window=64, clock=(clock := Clock()))
    for _ in range(3):
        record(budget, GOOD, 30)
        pauses = []
        began = clock.now
        while clock.now - began < 50:
            record(budget, BAD, 20)  # everything in flight, again and again
            pauses.append(budget.pause_s)
            clock.now += budget.pause_s
        assert pauses == sorted(pauses)
        assert pauses[0] == 0.5
        assert pauses[-1] == 10
        assert len(pauses) < 15
        record(budget, GOOD)
        assert not budget.is_outage
        assert budget.pause_s == 0


def test_endless_outage_stops_the_run_at_any_failure_rate():
    budget = FailureBudget(1.0, window=64, clock=(clock := Clock()))
    record(budget, GOOD)
    record(budget, BAD, 500)
    clock.now += 61
    with pytest.raises(FailureBudgetError, match="no episode has completed for 61 s, 501 failed"):
        record(budget, BAD)


def test_rare_successes_are_not_a_recovery():
    budget = FailureBudget(0.5, window=64)
    record(budget, GOOD, 64)
    with pytest.raises(FailureBudgetError):
        alternate(budget, 30, times=20)


# ---- in a run ------------------------------------------------------------------------------------


class Restarted(ScriptedEngine):
    """Fails every request at once for `seconds`, from the twentieth call on."""

    def __init__(self, seconds):
        super().__init__(["10"], latency_s=0.1)
        self.seconds = seconds
        self.back_at = None

    async def generate(self, prompt_ids, params, *, session=None):
        loop = asyncio.get_running_loop()
        if self.num_calls >= 20 and self.back_at is None:
            self.back_at = loop.time() + self.seconds
        if self.back_at is not None and loop.time() < self.back_at:
            raise EngineError("connection refused")
        return await super().generate(prompt_ids, params, session=session)


def play(loop, env, engine, num_batches, **config):
    config = {"batch_groups": 4, "group_size": 4, "max_in_flight": 16, **config}

    async def train():
        runner = RolloutRunner(
            EpisodeSetup(env, ChatAgent(), engine, byte_renderer()), RolloutConfig(**config)
        )
        async with runner:
            for _ in range(num_batches):
                batch = await runner.next_batch()
                assert len(batch) == 4
                await engine.publish([], engine.policy_version + 1)
        return runner.stats()

    try:
        return loop.run_until_complete(train())
    finally:
        loop.end()


@pytest.fixture
def loop():
    return VirtualLoop()


def test_run_survives_a_server_restart(loop):
    stats = play(loop, Sums, Restarted(30), 6)
    assert stats.num_groups == 24
    # Pauses grow: a few waves of what is in flight, not thousands of episodes.
    assert 16 <= stats.num_failures["engine_error"] <= 16 * 12


def test_lost_server_stops_the_run(loop):
    with pytest.raises(FailureBudgetError, match=r"no episode has completed for .* s"):
        play(loop, Sums, Restarted(10**6), 6)
    assert 60 < loop.time() < 90


def test_unavailable_tasks_are_waited_for(loop):
    class Away(Sums):
        def sample_task(self, rng, options):
            if 1 < loop.time() < 30:
                raise EnvError("the data base is away")
            return super().sample_task(rng, options)

    engine = ScriptedEngine(["10"], latency_s=0.2)
    stats = play(loop, Away, engine, 12)
    assert stats.num_groups == 48
    assert 10 < stats.num_failures["env_error"] < 100
