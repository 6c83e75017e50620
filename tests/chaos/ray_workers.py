"""Ray's rollout workers killed at random during a run; skipped where Ray is not installed.

Workers get SIGKILL while they play. Every group must be trained once, in order, with all members.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import load_config
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.engines.server import EngineServer
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.envs.base import Response, TextEnv
from areal_gym.errors import InfrastructureError
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.types import Task


class TwoTurns(TextEnv):
    """Waits a little in each of two turns."""

    def sample_task(self, rng, options):
        number = options.get("index", int(rng.integers(10**9)))
        return Task(id=str(number), data={"number": number}, split=options["split"])

    def first_messages(self, task):
        return [{"role": "user", "content": f"Where is {task.data['number']}?"}]

    async def respond(self, message):
        await asyncio.sleep(0.02)
        if self.num_turns < 2:
            return Response(messages=[{"role": "user", "content": "Sure?"}])
        return Response(reward=1.0, is_terminated=True)


async def _kill(workers, num_kills, rest_s, kills):
    choose = random.Random(3)
    while len(kills) < num_kills:
        await asyncio.sleep(rest_s * (0.5 + choose.random()))
        if workers.pids:
            victim = choose.choice(workers.pids)
            if victim not in kills:
                kills.append(victim)
                os.kill(victim, signal.SIGKILL)


async def _play(num_batches, num_kills, rest_s):
    from areal_gym.distributed.cluster import open_cluster
    from areal_gym.distributed.rollout_workers import RolloutWorkers, WorkerSetup

    config = load_config(
        overrides=[
            *("cluster.address=local", "cluster.rollout_workers=2", "trainer.runs_in=thread"),
            *("rollout.group_size=4", "rollout.batch_groups=4", "rollout.max_in_flight=12"),
            *("rollout.max_new_tokens=16", "rollout.max_retries=0", "rollout.max_staleness=1"),
        ]
    )
    engine = ScriptedEngine(lambda question: "I am here.", latency_s=0.02)
    server = EngineServer(engine)
    groups, kills = [], []
    async with open_cluster(config) as cluster, server:
        setup = WorkerSetup(
            env_factory=TwoTurns,
            agent=ChatAgent(),
            open_engine=partial(SGLangEngine, Path("policy"), urls=[server.url], is_guest=True),
            open_renderer=byte_renderer,
            rollout=config.rollout,
        )
        workers = RolloutWorkers(cluster, setup, 2)
        killing = None
        try:
            await workers.start()
            killing = asyncio.create_task(_kill(workers, num_kills, rest_s, kills))
            async with RolloutRunner(
                EpisodeSetup(TwoTurns, ChatAgent(), engine, byte_renderer()),
                config.rollout,
                episode_runner=workers,
            ) as runner:
                version = 0
                while version < num_batches or not killing.done():
                    groups += await runner.next_batch()
                    version += 1
                    await engine.publish([], version)
                stats = runner.stats()
            num_lost = workers.num_lost
        finally:
            if killing is not None:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)
            await workers.aclose()
    return groups, kills, stats, num_lost


def run(small: bool, directory: Path) -> dict[str, object]:
    """Play on two workers while they are killed, and account for every group."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'areal-gym[ray]'")
    size = (2, 1, 0.3) if small else (60, 12, 2.0)
    try:
        groups, kills, stats, num_lost = asyncio.run(_play(*size))
    except InfrastructureError as error:
        if "no Ray at" in str(error):
            pytest.skip(f"Ray does not start on this machine now: {error}")
        raise
    sizes = Counter(len(group) for group in groups)
    assert set(sizes) == {4}, sizes
    ids = [group.id for group in groups]
    assert len(set(ids)) == len(ids), "a group was trained twice"
    assert stats.num_groups_failed == 0
    return {
        "groups trained": len(groups),
        "workers killed": len(kills),
        "deaths noticed": num_lost,
        "episodes lost, and played again": stats.num_lost,
        "groups played again": stats.num_replayed_groups,
        "groups dropped": stats.num_groups_failed,
    }
