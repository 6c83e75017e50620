"""Episodes lost in an outage are played again: no group is dropped, shrunken or biased."""

import asyncio
import random
from statistics import fmean

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.base import Generation
from areal_gym.engines.scripted import ByteTokenizer, ScriptedEngine, byte_renderer
from areal_gym.errors import (
    EngineError,
    EngineUnreachableError,
    EnvUnreachableError,
    FailureBudgetError,
    SandboxError,
)
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.failures import Outage
from areal_gym.rollout.journal import Journal
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.types import FinishReason
from tests._support.sums_env import Sums
from tests._support.virtual_time import VirtualLoop

BATCH, SIZE = 6, 4


class Lengths(ScriptedEngine):
    """Answers take one second per letter; their lengths do not depend on the given seed.

    A retry is a new draw, as with servers that ignore seeds.
    """

    def __init__(self, error=EngineUnreachableError, outages=(), **options):
        super().__init__([], max_context=400)
        self.random = random.Random(5)
        self.error = error
        self.outages = list(outages)
        self.in_flight = set()
        self.num_lost = 0
        self.gone_until = 0.0

    async def generate(self, prompt_ids, params, *, session=None):
        loop = asyncio.get_running_loop()
        if loop.time() < self.gone_until:
            raise self.error("connection refused")
        length = self.random.choice([1, 2, 3, 20, 30, 40])
        gone = loop.create_future()
        self.in_flight.add(gone)
        try:
            done, _ = await asyncio.wait({gone}, timeout=length)
        finally:
            self.in_flight.discard(gone)
        if done:
            self.num_lost += 1
            raise self.error("the server was lost")
        ids = (*ByteTokenizer().encode("1" * length), ByteTokenizer.eos_token_id)
        return Generation(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            versions=(self.policy_version,) * len(ids),
            finish_reason=FinishReason.STOP,
        )

    async def break_down(self):
        loop = asyncio.get_running_loop()
        for begin, end in self.outages:
            await asyncio.sleep(begin - loop.time())
            self.gone_until = end
            for gone in self.in_flight:
                gone.set_result(None)


def play(engine, *, num_batches=4, env=Sums, journal=None, **config):
    """Return the batches of a run over the engine, its stats, and how long it took."""
    loop = VirtualLoop()
    config = {
        "batch_groups": BATCH,
        "group_size": SIZE,
        "max_in_flight": BATCH * SIZE,
        "max_new_tokens": 64,
        **config,
    }

    async def train():
        batches = []
        breaking = asyncio.create_task(engine.break_down())
        settings = RolloutConfig(**config)
        runner = RolloutRunner(
            EpisodeSetup(env, ChatAgent(), engine, byte_renderer()), settings, journal=journal
        )
        async with runner:
            for _ in range(num_batches):
                batches.append(await runner.next_batch())
                await engine.publish([], engine.policy_version + 1)
        breaking.cancel()
        await asyncio.gather(breaking, return_exceptions=True)
        return batches, runner.stats(), loop.time()

    try:
        return loop.run_until_complete(train())
    finally:
        loop.end()


def lengths_of(batch):
    return [len(trajectory.messages[-1]["content"]) for group in batch for trajectory in group]


@pytest.mark.parametrize("staleness", [0, 2])
def test_outage_neither_loses_nor_shrinks_groups(staleness):
    engine = Lengths(outages=[(10, 40), (100, 600), (605, 620)])
    batches, stats, _ = play(engine, num_batches=6, max_staleness=staleness, max_retries=0)
    assert engine.num_lost >= 5
    assert all(len(group) == SIZE and not group.num_failed for b in batches for group in b)
    ids = [group.id for batch in batches for group in batch]
    assert len(set(ids)) == len(ids) == 6 * BATCH
    assert stats.num_groups_failed == 0
    assert stats.num_lost > 0
    assert stats.num_replayed_groups > 0
    if staleness == 0:
        assert ids == [f"g{index:06d}" for index in range(6 * BATCH)]


def test_batches_around_an_outage_have_unbiased_lengths():
    """The server dies when the short episodes have ended: survivors alone would be too short."""

    def mean_length(outages):
        means = []
        for number in range(12):
            engine = Lengths(outages=outages)
            engine.random.seed(number)
            batches, _, _ = play(engine, num_batches=1)
            means += lengths_of(batches[0])
        return fmean(means)

    undisturbed, disturbed = mean_length([]), mean_length([(5, 30)])
    # 16 in the mean, with a standard error of 0.9 each; the survivors alone have 2, and lost
    # members that were simply drawn again make 9.
    assert undisturbed == pytest.approx(16, abs=2.5)
    assert disturbed == pytest.approx(undisturbed, abs=3.0)


def test_groups_completed_during_an_outage_are_replayed(tmp_path):
    class Quick(Lengths):
        """Takes long for the first two tasks only."""

        async def generate(self, prompt_ids, params, *, session=None):
            self.random = random.Random(len(self.seen))
            self.seen.append(session)
            self.random.choice = lambda _: 30 if len(self.seen) <= 2 * SIZE else 1
            return await super().generate(prompt_ids, params, session=session)

    engine = Quick(outages=[(10, 20)])
    engine.seen = []
    with Journal(tmp_path / "journal.jsonl") as journal:
        batches, stats, _ = play(engine, num_batches=1, journal=journal)
    # Four groups were complete when the other two were hit; which began before them.
    assert stats.num_replayed_groups >= BATCH
    assert all("-replay" in trajectory.id for group in batches[0] for trajectory in group)
    assert len(engine.seen) >= 2 * BATCH * SIZE
    with Journal(tmp_path / "journal.jsonl") as journal:
        known = journal.take_known()
    assert all(entry.group is not None for entry in known.values())
    assert [entry.group.trajectories[0].id for entry in known.values()] == [
        group.trajectories[0].id for group in batches[0]
    ]


def test_loss_of_one_worker_replays_only_its_groups():
    """One worker of several dies: its groups are played again, and all others are kept."""

    class OneOfMany(Lengths):
        async def break_down(self):
            await asyncio.sleep(5)
            next(iter(self.in_flight)).set_result(None)

    batches, stats, _ = play(OneOfMany(), num_batches=2)
    assert stats.num_lost == 1
    assert stats.num_replayed_groups == 1
    assert all(len(group) == SIZE for batch in batches for group in batch)


def test_outage_beyond_patience_stops_the_run():
    engine = Lengths(outages=[(50, 10**9)])
    with pytest.raises(
        FailureBudgetError, match=r"waited 4\d\d s .*outage_patience_s = 400"
    ) as caught:
        play(engine, outage_patience_s=400)
    assert "connection refused" in str(caught.value)
    assert any("--resume" in hint for hint in caught.value.hints)


def test_repeated_sandbox_failure_is_not_an_outage():
    """Other episodes succeed: the failing group is dropped instead of being replayed for ever."""

    class Breaks(Sums):
        num_breaks = 0

        async def respond(self, message):
            if self.task.id == Breaks.chosen:
                Breaks.num_breaks += 1
                raise SandboxError("the sandbox died")
            return await super().respond(message)

        def sample_task(self, rng, options):
            task = super().sample_task(rng, options)
            Breaks.chosen = getattr(Breaks, "chosen", task.id)
            return task

    batches, stats, _ = play(Lengths(), num_batches=3, env=Breaks, max_retries=1)
    assert stats.num_groups_failed == 1
    assert stats.num_lost == 0
    assert Breaks.num_breaks >= 2 * SIZE
    assert all(len(group) == SIZE for batch in batches for group in batch)


def test_lost_environment_server_is_waited_for():
    class Away(Sums):
        def sample_task(self, rng, options):
            if 1 < asyncio.get_running_loop().time() < 300:
                raise EnvUnreachableError("no answer from the environment")
            return super().sample_task(rng, options)

    batches, stats, seconds = play(Lengths(), num_batches=3, env=Away, max_retries=0)
    assert seconds > 300
    assert stats.num_groups_failed == 0
    assert [group.id for group in batches[1]] == [f"g{i:06d}" for i in range(BATCH, 2 * BATCH)]


def test_engine_that_never_worked_stops_the_run():
    engine = Lengths(error=EngineError, outages=[(0, 10**9)])
    with pytest.raises(FailureBudgetError, match="connection refused"):
        play(engine, max_failure_rate=1.0)


def test_outage_starts_at_its_first_loss():
    now = [0.0]
    outage = Outage(100, clock=lambda: now[0])
    assert (outage.seconds, outage.hold_s) == (0, 0)
    outage.lost("gone")
    now[0] = 60.0
    assert outage.seconds == 60
    assert outage.pause_s == 10
    outage.hold(outage.pause_s)
    assert outage.hold_s == 10
    outage.end()
    assert (outage.seconds, outage.hold_s) == (0, 0)
