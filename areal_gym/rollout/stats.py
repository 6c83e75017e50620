"""Where a runner stands, and where its episodes' time goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

from areal_gym.recording import InFlight


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStats:
    """Where the runner stands.

    Counts and seconds are since its start: the difference of two snapshots is what happened
    between them.
    """

    policy_version: int
    elapsed_s: float
    """Wall seconds since the runner was made."""

    # What goes on now.
    episodes_in_flight: int
    episodes_queued: int
    """Members of groups that have started which wait for a free slot."""
    waiting_on_engine: int
    waiting_on_env: int
    waiting_on_agent: int
    groups_running: int
    groups_ready: int
    """Complete groups that wait for the trainer."""
    oldest_ready_s: float
    """How long the one of them that was started first has waited; 0 when there is none."""
    room: int
    """Groups that may still start under the staleness limit; 0: rollouts wait for the trainer."""

    # What has come of the groups. A group that was started is running, ready, or one of these.
    num_groups_started: int
    num_groups_accepted: int
    """Complete, and kept by all filters; those that became too old afterwards included."""
    num_groups: int
    """Groups handed to the trainer."""
    num_groups_failed: int
    """Dropped: fewer than `min_group_size` members came through."""
    num_groups_stale: int
    """Dropped at the trainer's door: too old."""
    num_groups_rejected: Mapping[str, int]
    """Dropped by a filter, by "filter/reason"."""
    num_groups_restored: int
    """Taken over, complete, from the journal of the interrupted run."""

    # Episodes.
    num_episodes: int
    """Episodes played to an end, failures and retries included."""
    num_retries: int
    num_lost: int = 0
    """Episodes that an outage ended; their groups are played again."""
    num_replayed_groups: int = 0
    """Groups that were played again, whole, because of failures of the infrastructure."""
    outage_s: float = 0.0
    """For how long nothing has come through, because servers, workers or sandboxes are gone."""
    outage_patience_s: float = 0.0
    """How long that may last."""
    num_failures: Mapping[str, int]
    """Failed episodes by stop reason."""
    num_tokens: int
    """Tokens that the policy sampled in episodes that have ended, failures included."""
    engine_s: float
    """Episode-seconds spent waiting on the engine: the integral of `waiting_on_engine`."""
    env_s: float
    """Episode-seconds in the environment."""
    agent_s: float
    """Episode-seconds in the agent's own code, waiting for the event loop included."""

    @property
    def acceptance_rate(self) -> float:
        """Share of the groups that came through which the filters kept; 1 before there are any."""
        num_judged = self.num_groups_accepted + sum(self.num_groups_rejected.values())
        return self.num_groups_accepted / num_judged if num_judged else 1.0


class Occupancy(InFlight):
    """Counts of episodes in flight that know their own integrals over time.

    While a count changes by d at time t, the sum of d * t is kept; the integral up to T is then
    count * T less that sum. One multiplication per change, and exact.
    """

    __slots__ = ("_engine", "_engine_t", "_env", "_env_t", "_episodes", "_episodes_t")

    def __init__(self) -> None:
        self._engine = self._env = self._episodes = 0
        self._engine_t = self._env_t = self._episodes_t = 0.0

    @property
    def engine(self) -> int:
        """Episodes that wait on the engine."""
        return self._engine

    @engine.setter
    def engine(self, count: int) -> None:
        self._engine_t += (count - self._engine) * perf_counter()
        self._engine = count

    @property
    def env(self) -> int:
        """Episodes in the environment."""
        return self._env

    @env.setter
    def env(self, count: int) -> None:
        self._env_t += (count - self._env) * perf_counter()
        self._env = count

    @property
    def episodes(self) -> int:
        """All that are being played."""
        return self._episodes

    @episodes.setter
    def episodes(self, count: int) -> None:
        self._episodes_t += (count - self._episodes) * perf_counter()
        self._episodes = count

    def integrals(self) -> tuple[float, float, float]:
        """Episode-seconds so far: on the engine, in the environment, in the agent."""
        now = perf_counter()
        engine_s = self._engine * now - self._engine_t
        env_s = self._env * now - self._env_t
        return engine_s, env_s, self._episodes * now - self._episodes_t - engine_s - env_s
