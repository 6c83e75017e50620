"""Servers that Ray places: they serve, come back in their place when killed, and end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'areal-gym[ray]'")

from areal_gym.config import load_config
from areal_gym.distributed.cluster import open_cluster
from areal_gym.distributed.ray_servers import place_servers
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.errors import EngineError

pytestmark = pytest.mark.slow

FAKE = [sys.executable, "-m", "areal_gym.engines.sglang.fake"]


def config_of():
    return load_config(
        overrides=[
            "cluster.address=local",
            "cluster.servers=1",
            "cluster.gpus_per_server=0",
            "engine.id=sglang",
            "trainer.runs_in=thread",
        ]
    )


@pytest.mark.long  # runs of test_cluster_runs restart servers, too
def test_dead_server_process_or_actor_is_restarted(tiny_policy):
    async def scenario():
        async with open_cluster(config_of()) as cluster:
            (process,) = await place_servers(
                cluster, tiny_policy, 1, recipe=SGLangEngine.recipe, command=FAKE
            )
            engine = SGLangEngine(
                tiny_policy, processes=[process], health_interval_s=0.1, grace_s=120
            )
            await engine.start()
            try:
                url = process.url
                assert "127.0.0.1" not in url
                async with engine.updating(1) as servers:
                    await servers[0].load_from_disk(tiny_policy, 1)
                params = SamplingParams(max_new_tokens=4)
                assert set((await engine.generate([5], params)).versions) == {1}
                for number, kill in enumerate((kill_server, kill_actor), 1):
                    await kill(process)
                    async with asyncio.timeout(120):
                        while engine.stats.num_relaunches < number:
                            await asyncio.sleep(0.02)
                    # It waits for the server, which is given the newest weights first.
                    assert set((await engine.generate([5], params)).versions) == {1}
                    assert process.url == url
                assert engine.stats.num_servers_lost == 2
            finally:
                await engine.aclose()
            assert not process.is_running

    asyncio.run(scenario())


async def kill_server(process):
    os.killpg(await process._actor.process_group.remote(), signal.SIGKILL)


async def kill_actor(process):
    import ray

    ray.kill(process._actor)


def test_failed_server_start_gives_the_reason(tiny_policy):
    async def scenario():
        async with open_cluster(config_of()) as cluster:
            command = [sys.executable, "-c", "print('no such GPU'); raise SystemExit(3)"]
            (process,) = await place_servers(
                cluster, tiny_policy, 1, recipe=SGLangEngine.recipe, command=command
            )
            engine = SGLangEngine(tiny_policy, processes=[process])
            try:
                await engine.start()
            finally:
                await engine.aclose()

    with pytest.raises(EngineError, match="ended while it was starting") as caught:
        asyncio.run(scenario())
    assert "no such GPU" in caught.value.hints
