"""Runs single episodes: in this process, or in others (`areal_gym.distributed`).

An `EpisodeRunner` turns one request into one trajectory. Its caller decides which episodes are
played, and about admission, staleness, the journal, filters and retries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from areal_gym.agents.base import Agent
from areal_gym.chat import Renderer
from areal_gym.config import RolloutConfig
from areal_gym.engines.base import Engine, InterruptedEngine, SamplingParams
from areal_gym.envs.base import TextEnv
from areal_gym.recording import InFlight
from areal_gym.rollout.episode import play_episode
from areal_gym.rollout.stats import Occupancy
from areal_gym.types import Task, Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """The environment, agent and engine of a run. The engine has been started."""

    env_factory: Callable[[], TextEnv]
    """Makes one environment instance."""
    agent: Agent
    """The agent that plays all episodes; they share its state."""
    engine: Engine
    renderer: Renderer
    env_id: str | None = field(default=None, kw_only=True)
    agent_id: str = field(default="chat", kw_only=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRequest:
    """One episode to play."""

    task: Task
    seed: int
    """Seeds the environment and sampling."""
    trajectory_id: str
    group_id: str


PlayEpisode = Callable[[TextEnv, EpisodeRequest], Awaitable[Trajectory]]
"""Plays one episode in the given environment instance; failures are recorded, not raised."""


class EpisodeRunner(Protocol):
    """Plays many episodes at once, on one event loop."""

    @property
    def in_flight(self) -> Occupancy:
        """The number of episodes in flight, and what they wait for."""

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """Play one episode; failures are recorded, but an invalid request is a UsageError."""


def play_with_engine(
    agent: Agent,
    engine: Engine,
    renderer: Renderer,
    params: SamplingParams,
    timeout_s: float | None,
    env_id: str | None = None,
    agent_id: str = "chat",
    in_flight: InFlight | None = None,
) -> PlayEpisode:
    """Return a function that plays one episode; the arguments are those of `play_episode`."""

    async def play(env: TextEnv, request: EpisodeRequest) -> Trajectory:
        return await play_episode(
            env,
            agent,
            engine,
            renderer,
            options={"task": request.task},
            seed=request.seed,
            params=params,
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            env_id=env_id,
            agent_id=agent_id,
            timeout_s=timeout_s,
            in_flight=in_flight,
        )

    return play


class EnvPool:
    """Keeps environment instances for reuse: as many as were ever in use at once.

    `reset` makes a used instance as good as new, and `play_episode` has released what its episode
    held. Do not give back an instance whose episode failed: its state is unknown.
    """

    def __init__(self, factory: Callable[[], TextEnv]) -> None:
        self._factory = factory
        self._free: list[TextEnv] = []

    def take(self) -> TextEnv:
        """Take an instance from the pool, or make one if none is free."""
        return self._free.pop() if self._free else self._factory()

    def give_back(self, env: TextEnv) -> None:
        """Put an instance back for another episode."""
        self._free.append(env)


class LocalEpisodeRunner:
    """Plays episodes on this event loop, in environments from a pool.

    An instance returns to the pool unless its episode failed. `play` keeps the counters `in_flight`
    up to date.
    """

    def __init__(
        self, envs: EnvPool, play: PlayEpisode, in_flight: Occupancy | None = None
    ) -> None:
        self.in_flight = in_flight or Occupancy()
        self._envs = envs
        self._play = play

    @classmethod
    def for_training(
        cls, setup: EpisodeSetup, config: RolloutConfig, envs: EnvPool | None = None
    ) -> LocalEpisodeRunner:
        """Return a runner of training episodes. Its caller replays episodes that an outage ended.

        `envs` is a pool to share; by default the runner has its own.
        """
        if isinstance(setup.engine, InterruptedEngine):
            setup.engine.fails_lost_turns = True
        params = SamplingParams(
            max_new_tokens=config.max_new_tokens, temperature=config.temperature
        )
        in_flight = Occupancy()
        play = play_with_engine(
            *(setup.agent, setup.engine, setup.renderer, params, config.episode_timeout_s),
            env_id=setup.env_id,
            agent_id=setup.agent_id,
            in_flight=in_flight,
        )
        return cls(envs or EnvPool(setup.env_factory), play, in_flight)

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """Play one episode in an instance from the pool, as `EpisodeRunner.play` does."""
        env = self._envs.take()
        trajectory = await self._play(env, request)
        if not trajectory.stop_reason.is_failure:
            self._envs.give_back(env)
        return trajectory
