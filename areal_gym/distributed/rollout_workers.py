"""Play episodes in other processes: each worker is a Ray actor with environments and an agent.

    runner --request--> RolloutWorkers --> the least busy worker: LocalEpisodeRunner --> engine
           <------------trajectory, packed--------------------

The runner still decides which episodes are played, and forms the groups. If a worker dies, its
episodes are returned as failures (`WORKER_ERROR`), the runner plays them again on another worker,
and the worker is restarted. A worker that does not answer for longer than an episode may take is
killed and restarted, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_gym.agents.base import Agent
from areal_gym.chat import Renderer
from areal_gym.config import RolloutConfig
from areal_gym.distributed.cluster import Cluster
from areal_gym.engines.base import Engine
from areal_gym.envs.base import TextEnv
from areal_gym.errors import ConfigError, GymError, InfrastructureError, WorkerError
from areal_gym.images import (
    ImageLimits,
    hashes_in,
    hashes_of,
    image_limits,
    image_store,
    set_image_limits,
)
from areal_gym.recording import stop_reason_of
from areal_gym.rollout.episode_runners import (
    EnvPool,
    EpisodeRequest,
    EpisodeSetup,
    LocalEpisodeRunner,
)
from areal_gym.rollout.group_json import dump_row, pack_trajectory, unpack_trajectory
from areal_gym.rollout.stats import Occupancy
from areal_gym.types import Trajectory

_PROBE_S = 0.5
"""The pause between two probes of a worker, for whether it is alive and what its episodes do."""
_START_S = 300.0  # the imports of an environment may take long on a busy machine
_END_S = 10.0
_MAX_FAILED_STARTS = 3  # the most failed starts of a worker in a row


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """The parts of a worker, which are pickled and sent to its process."""

    env_factory: Callable[[], TextEnv]
    agent: Agent
    """The agent, of which each worker has one copy for all of its episodes."""
    open_engine: Callable[[], Engine]
    """Makes an engine for the run's servers; the worker starts and closes it."""
    open_renderer: Callable[[], Renderer]
    rollout: RolloutConfig
    env_id: str | None = None
    agent_id: str = "chat"
    image_limits: ImageLimits = field(default_factory=image_limits)


class RolloutWorkers:
    """An `EpisodeRunner` with several processes; call `start` before and `aclose` afterwards."""

    def __init__(self, cluster: Cluster, setup: WorkerSetup, num_workers: int) -> None:
        self.in_flight = Occupancy()
        """The counts of episodes; those of waiting ones are up to half a second old."""
        self.num_lost = 0
        """The number of workers that died or had to be killed."""
        self._cluster = cluster
        self._setup = setup
        self._shipped: Any = None
        self._num_workers = num_workers
        self._workers: list[_Worker] = []  # workers that are ready to play
        self._supervisors: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._fatal: GymError | None = None

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that are ready, which may be on different machines."""
        return [worker.pid for worker in self._workers]

    async def start(self) -> None:
        """Start all workers, and return when they are ready.

        Raises:
            GymError: an environment, an agent or an engine could not be made or pickled, or a
                worker did not start.
        """
        import ray

        try:
            self._shipped = ray.put(self._setup)
        except TypeError as error:
            raise ConfigError(
                f"environment or agent cannot be sent to a rollout worker: {error}",
                hints=["let them open what they need on first use", "cluster.rollout_workers=0"],
            ) from error
        self._supervisors = [
            asyncio.create_task(self._supervise(i)) for i in range(self._num_workers)
        ]
        while len(self._workers) < self._num_workers:
            await self._change()

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """Let the least busy worker play an episode, as `EpisodeRunner.play` does."""
        import ray

        self.in_flight.episodes += 1
        try:
            while not self._workers:
                await self._change()
            worker = min(self._workers, key=lambda worker: worker.num_playing)
            worker.num_playing += 1
            playing = worker.actor.play.remote(request, worker.pictures_for(request))
            try:
                reply = await playing
            except asyncio.CancelledError:
                ray.cancel(playing)
                raise
            except ray.exceptions.RayActorError:
                self._retire(worker)
                return self._lost(request, worker)
            finally:
                worker.num_playing -= 1
        finally:
            self.in_flight.episodes -= 1
        if isinstance(reply, GymError):
            raise reply
        row, pictures = reply
        for png in pictures:
            image_store().put(png)
        return unpack_trajectory(json.loads(row), request.task)

    async def aclose(self) -> None:
        """End the workers and their episodes. Idempotent."""
        self._fatal = self._fatal or InfrastructureError("the rollout workers were closed")
        self._changed.set()
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)

    def _lost(self, request: EpisodeRequest, worker: _Worker) -> Trajectory:
        error = WorkerError(f"the rollout worker that played it died (process {worker.pid})")
        return Trajectory(
            id=request.trajectory_id,
            group_id=request.group_id,
            task=request.task,
            env_id=self._setup.env_id or "",
            agent_id=self._setup.agent_id,
            seed=request.seed,
            stop_reason=stop_reason_of(error),
            error=str(error),
            is_lost=True,
        )

    async def _change(self) -> None:
        """Wait until a worker is ready or lost."""
        if self._fatal is None:
            self._changed.clear()
            await self._changed.wait()
        if self._fatal is not None:
            raise self._fatal

    # ---- restarting workers, each in its place ------------------------------------------------

    async def _supervise(self, index: int) -> None:
        import ray

        num_failed = 0
        # Besides the episodes, there are calls to start, to probe and to close.
        num_calls = self._setup.rollout.max_in_flight + 8
        place = self._cluster.options("worker", index)
        actor_class = ray.remote(_WorkerActor).options(**place, max_concurrency=num_calls)
        while self._fatal is None:
            worker = _Worker(actor_class.remote(self._shipped))
            try:
                await self._run_worker(worker)
            except (ray.exceptions.RayError, TimeoutError) as error:
                self.num_lost += 1
                num_failed = 0 if worker.pid else num_failed + 1
                if num_failed == _MAX_FAILED_STARTS:
                    self._fatal = InfrastructureError(
                        f"rollout worker {index} did not start, {num_failed} times in a row: "
                        f"{str(error).strip() or 'it did not answer'}",
                        hints=["its log is where Ray keeps them: /tmp/ray/session_latest/logs"],
                    )
            except GymError as error:
                self._fatal = error
            except asyncio.CancelledError:
                # Let its episodes end; if that takes too long, the worker is killed below.
                with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
                    async with asyncio.timeout(_END_S):
                        await worker.actor.aclose.remote()
                raise
            finally:
                self._retire(worker)
                ray.kill(worker.actor)

    async def _run_worker(self, worker: _Worker) -> None:
        """Start a worker and probe it until it dies, which raises an error of Ray."""
        async with asyncio.timeout(_START_S):
            started = await worker.actor.start.remote()
        if isinstance(started, GymError):
            raise started
        worker.pid = started
        self._workers.append(worker)
        self._changed.set()
        # An episode may block the worker's loop, but not for longer than its time limit.
        patience_s = self._setup.rollout.episode_timeout_s + _END_S
        while True:
            await asyncio.sleep(_PROBE_S)
            async with asyncio.timeout(patience_s):
                self._count_waiting(worker, *await worker.actor.in_flight.remote())

    def _count_waiting(self, worker: _Worker, engine: int, env: int) -> None:
        self.in_flight.engine += engine - worker.engine
        self.in_flight.env += env - worker.env
        worker.engine, worker.env = engine, env

    def _retire(self, worker: _Worker) -> None:
        """Send no more requests to a worker."""
        self._count_waiting(worker, 0, 0)
        if worker in self._workers:
            self._workers.remove(worker)
        self._changed.set()


@dataclass(eq=False, slots=True)
class _Worker:
    actor: Any
    pid: int = 0
    """The process id; 0 until the worker has started."""
    num_playing: int = 0
    engine: int = 0
    env: int = 0
    has_images: set[str] = field(default_factory=set)
    """The hashes of the images that the worker has been sent."""

    def pictures_for(self, request: EpisodeRequest) -> list[bytes]:
        """Return the images of the task that the worker has not been sent yet."""
        missing = [h for h in hashes_in(request.task.data) if h not in self.has_images]
        self.has_images.update(missing)
        return [image_store().read(sha256) for sha256 in missing]


# ---- in the worker ---------------------------------------------------------------------------


class _WorkerActor:
    """The actor of a worker, in its own process."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._engine: Engine | None = None
        self._episode_runner: LocalEpisodeRunner | None = None
        self._episodes: set[asyncio.Task[Trajectory]] = set()
        self._sent_images: set[str] = set()

    async def start(self) -> int | GymError:
        """Make the engine, the environments and the runner; return the process id, or an error."""
        setup = self._setup
        set_image_limits(setup.image_limits)
        try:
            self._engine = setup.open_engine()
            await self._engine.start()
            envs = EnvPool(setup.env_factory)
            envs.give_back(envs.take())  # a broken environment fails here
            episodes = EpisodeSetup(
                setup.env_factory,
                setup.agent,
                self._engine,
                setup.open_renderer(),
                env_id=setup.env_id,
                agent_id=setup.agent_id,
            )
            self._episode_runner = LocalEpisodeRunner.for_training(episodes, setup.rollout, envs)
        except GymError as error:
            return error
        return os.getpid()

    async def play(
        self, request: EpisodeRequest, pictures: Sequence[bytes] = ()
    ) -> tuple[bytes, list[bytes]] | GymError:
        """Return the packed trajectory, and those of its images that were not sent before."""
        assert self._episode_runner is not None
        for png in pictures:
            self._sent_images.add(image_store().put(png))
        episode = asyncio.create_task(self._episode_runner.play(request))
        self._episodes.add(episode)
        try:
            trajectory = await episode
            new = hashes_of(trajectory) - self._sent_images
            images = [image_store().read(sha256) for sha256 in new if sha256 in image_store()]
            self._sent_images |= new
            return dump_row(pack_trajectory(trajectory)), images
        except GymError as error:
            return error
        finally:
            self._episodes.discard(episode)

    async def in_flight(self) -> tuple[int, int]:
        assert self._episode_runner is not None
        return self._episode_runner.in_flight.engine, self._episode_runner.in_flight.env

    async def aclose(self) -> None:
        for episode in self._episodes:
            episode.cancel()
        await asyncio.gather(*self._episodes, return_exceptions=True)
        if self._engine is not None:
            await self._engine.aclose()
