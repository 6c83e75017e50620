"""Episodes in other processes: environments and agents as Ray's actors.

    runner --order--> RolloutWorkers --> the least busy worker: LocalPlayer --> engine with URLs
           <-----------trajectory, packed--------------------

What is played, what is too old and what becomes of a group stays with the runner. Nothing is lost
when a worker dies: its episodes come back as failures (`WORKER_ERROR`), the runner plays them again
elsewhere, and the worker is started again in its place. A worker that is silent for longer than an
episode may take is ended, and is then as good as dead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from areal_gym.agents.base import Agent
from areal_gym.chat import Renderer
from areal_gym.config import RolloutConfig
from areal_gym.distributed.cluster import Cluster
from areal_gym.engines.base import Engine
from areal_gym.envs.base import TextEnv
from areal_gym.errors import ConfigError, GymError, InfrastructureError, WorkerError
from areal_gym.recording import stop_reason_of
from areal_gym.rollout.env_pool import EnvPool
from areal_gym.rollout.episode_runners import (
    EpisodeRequest,
    EpisodeSetup,
    LocalEpisodeRunner,
)
from areal_gym.rollout.group_json import dump_row, pack_trajectory, unpack_trajectory
from areal_gym.rollout.stats import Occupancy
from areal_gym.types import Trajectory

_LOOK_S = 0.5
"""Between two looks at a worker: is it there, and what do its episodes wait for?"""
_START_S = 300.0
"""A worker imports what its environment needs, on a machine that may be busy."""
_END_S = 10.0
_MAX_FAILED_STARTS = 3
"""In a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What a worker is made of; it travels to its process, so all of it must be picklable."""

    env_factory: Callable[[], TextEnv]
    agent: Agent
    """Each worker has a copy, which plays all episodes there."""
    open_engine: Callable[[], Engine]
    """Makes an engine over servers that others publish to; started and ended by the worker."""
    open_renderer: Callable[[], Renderer]
    rollout: RolloutConfig
    env_id: str | None = None
    agent_id: str = "chat"


class RolloutWorkers:
    """A player (`areal_gym.rollout.episode_runners`) of several processes. Start it, and close it.

    Args:
        cluster: has the places of the role "worker".
        setup: what each of them is made of.
        num_workers: how many.
    """

    def __init__(self, cluster: Cluster, setup: WorkerSetup, num_workers: int) -> None:
        self.in_flight = Occupancy()
        """What episodes wait for is as of the last look, half a second ago at most."""
        self.num_lost = 0
        """Workers that died, or had to be ended."""
        self._cluster = cluster
        self._setup = setup
        self._shipped: Any = None
        self._num_workers = num_workers
        self._workers: list[_Worker] = []
        """Those that play."""
        self._tending: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._fatal: GymError | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that play; each on its own machine."""
        return [worker.pid for worker in self._workers]

    async def start(self) -> None:
        """Start all workers, and return when they play.

        Raises:
            GymError: what a worker's environment, agent or engine raises when it is made.
            ConfigError: they are no objects that could travel to another process.
            InfrastructureError: one does not start.
        """
        import ray

        try:
            self._shipped = ray.put(self._setup)
        except TypeError as error:
            raise ConfigError(
                f"environment or agent cannot be sent to a rollout worker: {error}",
                hints=["let them open what they need on first use", "cluster.rollout_workers=0"],
            ) from error
        self._tending = [asyncio.create_task(self._tend(i)) for i in range(self._num_workers)]
        while len(self._workers) < self._num_workers:
            await self._change()

    async def play(self, order: EpisodeRequest) -> Trajectory:
        """Let the least busy worker play; see `EpisodeRunner.play`.

        Raises:
            UsageError: the order is wrong.
            InfrastructureError: no worker can be started any more.
        """
        self.in_flight.episodes += 1
        try:
            return await self._send(order)
        finally:
            self.in_flight.episodes -= 1

    async def aclose(self) -> None:
        """End the workers and what they hold. Idempotent."""
        self._fatal = self._fatal or InfrastructureError("the rollout workers were closed")
        self._changed.set()
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)

    async def _send(self, order: EpisodeRequest) -> Trajectory:
        import ray

        while not self._workers:
            await self._change()
        worker = min(self._workers, key=lambda worker: worker.num_playing)
        worker.num_playing += 1
        playing = worker.actor.play.remote(order)
        try:
            answer = await playing
        except asyncio.CancelledError:
            ray.cancel(playing)
            raise
        except ray.exceptions.RayActorError:
            self._retire(worker)
            return self._lost(order, worker)
        finally:
            worker.num_playing -= 1
        if isinstance(answer, GymError):
            raise answer
        return unpack_trajectory(json.loads(answer), order.task)

    def _lost(self, order: EpisodeRequest, worker: _Worker) -> Trajectory:
        error = WorkerError(f"the rollout worker that played it died (process {worker.pid})")
        return Trajectory(
            id=order.trajectory_id,
            group_id=order.group_id,
            task=order.task,
            env_id=self._setup.env_id or "",
            agent_id=self._setup.agent_id,
            seed=order.seed,
            spans=(),
            turns=(),
            messages=(),
            stop_reason=stop_reason_of(error),
            error=str(error),
            is_lost=True,
            metrics={},
        )

    async def _change(self) -> None:
        """Wait until workers come or go."""
        if self._fatal is not None:
            raise self._fatal
        self._changed.clear()
        await self._changed.wait()
        if self._fatal is not None:
            raise self._fatal

    # ---- one worker after the other, in the same place ----------------------------------------

    async def _tend(self, index: int) -> None:
        import ray

        num_failed = 0
        while self._fatal is None:
            worker = _Worker(self._make(index))
            try:
                await self._live(worker)
            except (ray.exceptions.RayError, TimeoutError) as error:
                self.num_lost += 1
                num_failed = 0 if worker.has_started else num_failed + 1
                if num_failed == _MAX_FAILED_STARTS:
                    self._give_up(
                        InfrastructureError(
                            f"rollout worker {index} did not start, {num_failed} times in a row: "
                            f"{str(error).strip() or 'it did not answer'}",
                            hints=["its log is where Ray keeps them: /tmp/ray/session_latest/logs"],
                        )
                    )
            except GymError as error:
                self._give_up(error)
            except asyncio.CancelledError:
                await _farewell(worker)
                raise
            finally:
                self._retire(worker)
                ray.kill(worker.actor)

    async def _live(self, worker: _Worker) -> None:
        """From its start to its death, which is an error of Ray's."""
        async with asyncio.timeout(_START_S):
            started = await worker.actor.start.remote()
        if isinstance(started, GymError):
            raise started
        worker.pid = started
        worker.has_started = True
        self._workers.append(worker)
        self._changed.set()
        # Nobody's loop is blocked for longer than an episode may take.
        patience_s = self._setup.rollout.episode_timeout_s + _END_S
        while True:
            await asyncio.sleep(_LOOK_S)
            async with asyncio.timeout(patience_s):
                self._saw(worker, *await worker.actor.in_flight.remote())

    def _saw(self, worker: _Worker, engine: int, env: int) -> None:
        self.in_flight.engine += engine - worker.engine
        self.in_flight.env += env - worker.env
        worker.engine, worker.env = engine, env

    def _retire(self, worker: _Worker) -> None:
        """It gets no more orders."""
        self._saw(worker, 0, 0)
        if worker in self._workers:
            self._workers.remove(worker)
            self._changed.set()

    def _give_up(self, error: GymError) -> None:
        self._fatal = error
        self._changed.set()

    def _make(self, index: int) -> Any:
        import ray

        return (
            ray.remote(_Playing)
            .options(
                **self._cluster.options("worker", index),
                # Beside the episodes: start, looks, and the end.
                max_concurrency=self._setup.rollout.max_in_flight + 8,
            )
            .remote(self._shipped)
        )


@dataclass(eq=False, slots=True)
class _Worker:
    actor: Any
    pid: int = 0
    has_started: bool = False
    num_playing: int = 0
    engine: int = 0
    env: int = 0


async def _farewell(worker: _Worker) -> None:
    """Let it end its episodes and what they hold, if it does so soon."""
    import ray

    try:
        async with asyncio.timeout(_END_S):
            await worker.actor.aclose.remote()
    except (TimeoutError, ray.exceptions.RayError):
        pass  # it is killed next


# ---- in the worker ---------------------------------------------------------------------------


class _Playing:
    """One worker: a local player, ordered about from elsewhere."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._engine: Engine | None = None
        self._player: LocalEpisodeRunner | None = None
        self._episodes: set[asyncio.Task[Trajectory]] = set()

    async def start(self) -> int | GymError:
        """Make everything ready; the process id, or what went wrong."""
        import os

        setup = self._setup
        try:
            self._engine = setup.open_engine()
            await self._engine.start()
            envs = EnvPool(setup.env_factory)
            envs.give_back(envs.take())  # what is wrong with it is found now
            episodes = EpisodeSetup(
                setup.env_factory,
                setup.agent,
                self._engine,
                setup.open_renderer(),
                env_id=setup.env_id,
                agent_id=setup.agent_id,
            )
            self._player = LocalEpisodeRunner.for_training(episodes, setup.rollout, envs)
        except GymError as error:
            return error
        return os.getpid()

    async def play(self, order: EpisodeRequest) -> str | GymError:
        """A trajectory, packed."""
        assert self._player is not None
        episode = asyncio.create_task(self._player.play(order))
        self._episodes.add(episode)
        try:
            return dump_row(pack_trajectory(await episode))
        except GymError as error:
            return error
        finally:
            self._episodes.discard(episode)

    async def in_flight(self) -> tuple[int, int]:
        """How many episodes wait for the engine, and for the environment."""
        assert self._player is not None
        return self._player.in_flight.engine, self._player.in_flight.env

    async def aclose(self) -> None:
        """End the episodes, and the engine's connections."""
        for episode in self._episodes:
            episode.cancel()
        await asyncio.gather(*self._episodes, return_exceptions=True)
        if self._engine is not None:
            await self._engine.aclose()
