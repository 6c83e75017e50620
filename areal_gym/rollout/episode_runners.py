"""Who plays the runner's episodes: this process, or others (`areal_gym.distributed`).

The runner decides what is played and what becomes of it: admission, staleness, journal, filters,
retries. A player turns one order into one trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from areal_gym.agents.base import Agent
from areal_gym.chat import Renderer
from areal_gym.config import RolloutConfig
from areal_gym.engines.base import Engine, InterruptedEngine, SamplingParams
from areal_gym.rollout.env_pool import EnvPool
from areal_gym.rollout.episode import play_episode
from areal_gym.rollout.stats import Occupancy
from areal_gym.types import Task, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRequest:
    """One episode that is to be played."""

    task: Task
    seed: int
    """Of the environment and of sampling."""
    trajectory_id: str
    group_id: str


class EpisodeRunner(Protocol):
    """Plays many episodes at once, on one event loop."""

    @property
    def in_flight(self) -> Occupancy:
        """How many are being played, and what they wait for."""
        ...

    async def play(self, order: EpisodeRequest) -> Trajectory:
        """Play one episode; what fails is recorded in the trajectory.

        Raises:
            UsageError: the order itself is wrong (no such split, ...).
        """
        ...


class LocalEpisodeRunner:
    """Plays on this event loop.

    Args:
        envs: where instances come from, and go back to when their episode went well.
        agent: one object for all episodes.
        engine: samples the policy.
        renderer: messages to ids.
        config: how to sample, and how long an episode may last.
        env_id: the environment's registered id.
        agent_id: the agent's registered id.
    """

    def __init__(
        self,
        envs: EnvPool,
        agent: Agent,
        engine: Engine,
        renderer: Renderer,
        config: RolloutConfig,
        *,
        env_id: str | None = None,
        agent_id: str = "chat",
    ) -> None:
        self.in_flight = Occupancy()
        self._envs = envs
        self._agent = agent
        if isinstance(engine, InterruptedEngine):
            engine.fails_lost_turns = True
        self._engine = engine
        self._renderer = renderer
        self._params = SamplingParams(
            max_new_tokens=config.max_new_tokens, temperature=config.temperature
        )
        self._timeout_s = config.episode_timeout_s
        self._env_id = env_id
        self._agent_id = agent_id

    async def play(self, order: EpisodeRequest) -> Trajectory:
        """See `EpisodeRunner.play`."""
        env = self._envs.take()
        trajectory = await play_episode(
            env,
            self._agent,
            self._engine,
            self._renderer,
            options={"task": order.task},
            seed=order.seed,
            params=self._params,
            trajectory_id=order.trajectory_id,
            group_id=order.group_id,
            env_id=self._env_id,
            agent_id=self._agent_id,
            timeout_s=self._timeout_s,
            in_flight=self.in_flight,
        )
        if not trajectory.stop_reason.is_failure:
            self._envs.give_back(env)
        return trajectory
