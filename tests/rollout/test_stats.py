import asyncio
import dataclasses

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.rollout.stats import Occupancy
from tests._support.sums_env import CALL, Sums


class SlowTool(Sums):
    async def respond(self, message):
        await asyncio.sleep(0.02)
        if message.get("tool_calls"):
            return Response(messages=[{"role": "user", "content": "and?"}])
        return Response(reward=1.0, is_terminated=True)


def test_runner_stats_equal_the_sums_over_turns():
    async def scenario():
        engine = ScriptedEngine([CALL, CALL, "10"], latency_s=0.01)
        config = RolloutConfig(batch_groups=3, group_size=4, max_in_flight=5)
        async with RolloutRunner(
            EpisodeSetup(SlowTool, ChatAgent(), engine, byte_renderer()), config
        ) as runner:
            before = runner.stats()
            batch = await runner.next_batch()
            return before, runner.stats(), [t for group in batch for t in group]

    before, after, trajectories = asyncio.run(scenario())
    engine_s = sum(turn.engine_s for t in trajectories for turn in t.turns)
    env_s = sum(turn.env_s for t in trajectories for turn in t.turns)
    assert before.engine_s == before.env_s == before.agent_s == 0
    assert after.engine_s == pytest.approx(engine_s, rel=0.1)
    assert after.env_s == pytest.approx(env_s, rel=0.1)
    assert 0 <= after.agent_s < 0.5 * after.engine_s
    assert after.engine_s + after.env_s + after.agent_s <= 5 * after.elapsed_s
    assert after.num_tokens == sum(t.num_policy_tokens for t in trajectories)
    assert after.num_groups_started == after.num_groups == 3
    assert after.acceptance_rate == 1.0
    assert after.room == after.episodes_queued == after.groups_running == 0


def test_runner_stats_count_waiting_and_queued_episodes():
    async def scenario():
        engine = ScriptedEngine(["10"], latency_s=60)
        config = RolloutConfig(batch_groups=3, group_size=4, max_in_flight=5, max_staleness=1)
        async with RolloutRunner(
            EpisodeSetup(Sums, ChatAgent(), engine, byte_renderer()), config
        ) as runner:
            waiting = asyncio.create_task(runner.next_batch())
            async with asyncio.timeout(60):
                while (stats := runner.stats()).waiting_on_engine < 5:
                    await asyncio.sleep(0.001)
            waiting.cancel()
        return stats

    stats = asyncio.run(scenario())
    assert stats.waiting_on_engine == stats.episodes_in_flight == 5
    assert stats.groups_running == 2
    assert stats.episodes_queued == 3
    assert stats.room == 4
    assert stats.engine_s > 0
    assert stats.oldest_ready_s == 0
    assert dataclasses.asdict(stats)["num_groups_rejected"] == {}


def test_occupancy_counts_and_integrates_over_time():
    occupancy = Occupancy()
    occupancy.episodes += 2
    occupancy.engine += 1
    occupancy.env += 1
    assert (occupancy.episodes, occupancy.engine, occupancy.env, occupancy.agent) == (2, 1, 1, 0)
    occupancy.engine -= 1
    occupancy.env -= 1
    occupancy.episodes -= 2
    first = occupancy.integrals()
    assert all(seconds >= -1e-6 for seconds in first)
    assert occupancy.integrals() == pytest.approx(first)
