"""Starts the rollout workers of a run and connects them to its policy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from areal_gym.config import RunConfig
from areal_gym.distributed.cluster import Cluster
from areal_gym.distributed.rollout_workers import RolloutWorkers, WorkerSetup
from areal_gym.engines.base import Engine
from areal_gym.engines.server import EngineServer
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.runs.components import Components
from areal_gym.runs.open_engine import open_renderer


@asynccontextmanager
async def open_workers(
    config: RunConfig, components: Components, policy: Path, engine: Engine, cluster: Cluster | None
) -> AsyncIterator[RolloutWorkers | None]:
    """The settings' rollout workers, started; None when episodes are played in this process.

    Workers ask servers themselves. An engine in this process is served to them from here.

    Raises:
        GymError: what a worker's environment, agent or engine raises when it is made.
        InfrastructureError: a worker does not start.
    """
    if cluster is None or not config.cluster.rollout_workers:
        yield None
        return
    policy = policy.absolute()  # workers have a directory of their own
    async with AsyncExitStack() as stack:
        if isinstance(engine, SGLangEngine):
            urls = [state.client.url for state in engine.servers]
        else:
            server = EngineServer(engine, model_path=str(policy), host=cluster.host)
            await stack.enter_async_context(server)
            urls = [server.url]
        setup = WorkerSetup(
            env_factory=components.make_env,
            agent=components.agent,
            open_engine=partial(
                SGLangEngine, policy, urls=urls, max_context=engine.max_context, is_guest=True
            ),
            open_renderer=partial(open_renderer, config, policy),
            rollout=config.rollout,
            env_id=config.env.id,
            agent_id=config.agent.id,
        )
        workers = RolloutWorkers(cluster, setup, config.cluster.rollout_workers)
        stack.push_async_callback(workers.aclose)
        await workers.start()
        yield workers
