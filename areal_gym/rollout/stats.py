"""Numbers about rollouts: the state of a runner, how episodes spend their time, batch metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from areal_gym.episode_roles import rewards_by_role
from areal_gym.recording import InFlight
from areal_gym.types import Group, Trajectory
from areal_gym.utils.statistics import mean, merge_means, pass_at_k

_SUCCESS = 1.0 - 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStats:
    """The state of a runner in numbers.

    Counts and seconds start with the runner: subtract two snapshots for an interval.
    """

    policy_version: int
    elapsed_s: float
    """Wall seconds since the runner was made."""

    # The current state.
    episodes_in_flight: int
    episodes_queued: int
    """Members of running groups that wait for a free slot."""
    waiting_on_engine: int
    waiting_on_env: int
    waiting_on_agent: int
    groups_running: int
    groups_ready: int
    """Complete groups that wait for the trainer."""
    oldest_ready_s: float
    """Seconds that the first started of them has waited; 0 if there is none."""
    room: int
    """Groups that may start under the staleness limit; at 0, rollouts wait for the trainer."""

    # Groups. A started group is running, ready, or in one of these states.
    num_groups_started: int
    num_groups_accepted: int
    """Complete groups that all filters kept, even if they became stale afterwards."""
    num_groups: int
    """Groups handed to the trainer."""
    num_groups_failed: int
    """Groups dropped because fewer than `min_group_size` members completed."""
    num_groups_stale: int
    """Groups dropped because they were too old when a batch was handed out."""
    num_groups_rejected: Mapping[str, int]
    """Groups dropped by a filter, by "filter/reason"."""
    num_dropped_tasks: int = 0
    """Tasks that are not played any more, because their verifiers kept failing."""
    num_groups_restored: int
    """Complete groups restored from the journal of the interrupted run."""

    # Episodes.
    num_episodes: int
    """Episodes played to an end, failures and retries included."""
    num_retries: int
    num_lost: int = 0
    """Episodes that an outage ended; their groups are played again."""
    num_replayed_groups: int = 0
    """Groups that were played again as a whole because infrastructure failed."""
    outage_s: float = 0.0
    """Seconds since an outage of servers, workers or sandboxes began; 0 if there is none."""
    outage_patience_s: float = 0.0
    """The longest outage that is tolerated, in seconds."""
    num_failures: Mapping[str, int]
    """Failed episodes by stop reason."""
    num_tokens: int
    """Tokens that the policy sampled in ended episodes, failures included."""
    engine_s: float
    """Episode-seconds spent waiting on the engine: the integral of `waiting_on_engine`."""
    env_s: float
    """Episode-seconds in the environment."""
    agent_s: float
    """Episode-seconds in the agent's own code, including waits for the event loop."""

    @property
    def acceptance_rate(self) -> float:
        """The share of complete groups that the filters kept; 1 before there are any."""
        num_judged = self.num_groups_accepted + sum(self.num_groups_rejected.values())
        return self.num_groups_accepted / num_judged if num_judged else 1.0


class Occupancy(InFlight):
    """Counts episodes in flight, and integrates the counts over time."""

    def __init__(self) -> None:
        self._offsets = {"engine": 0.0, "env": 0.0, "episodes": 0.0}
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_offsets":
            # A count that changes by d at time t adds d * t to its offset. The integral of the
            # count up to time T is count * T - offset.
            self._offsets[name] += (value - getattr(self, name, 0)) * perf_counter()
        super().__setattr__(name, value)

    def integrals(self) -> tuple[float, float, float]:
        """Return episode-seconds so far: in the engine, in the environment, in the agent."""
        now = perf_counter()
        engine_s, env_s, episode_s = (
            getattr(self, name) * now - offset for name, offset in self._offsets.items()
        )
        return engine_s, env_s, episode_s - engine_s - env_s


def batch_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return the metrics of a batch that is about to be trained on (docs/metrics.md).

    Most are means over its trajectories. Staleness counts from `version`, the version of the
    weights that will be trained.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    parts = merge_means([t.reward_parts for t in trajectories])
    metrics = {f"reward/part/{name}": value for name, value in parts.items()}
    by_env: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_env.setdefault(trajectory.env_id, []).append(trajectory)
    for id, env_trajectories in sorted(by_env.items()):
        metrics[f"reward/env/{id}"] = mean(t.reward for t in env_trajectories)
        if len(by_env) > 1:
            metrics[f"rollout/share/{id}"] = len(env_trajectories) / len(trajectories)
            env_metrics = merge_means([t.metrics for t in env_trajectories])
            metrics |= {f"env/{id}/{name}": value for name, value in env_metrics.items()}
    roles = merge_means([rewards_by_role(t) for t in trajectories])
    metrics |= {f"reward/role/{role}": reward for role, reward in roles.items()}
    k = min((len(group) for group in groups), default=1)
    for size in sorted({1, k}):
        metrics[f"reward/pass@{size}"] = mean(
            pass_at_k(len(group), sum(r >= _SUCCESS for r in group.rewards_G), size)
            for group in groups
        )
    lengths = [t.num_policy_tokens for t in trajectories]
    metrics["rollout/policy_tokens_mean"] = mean(lengths)
    metrics["rollout/policy_tokens_max"] = float(max(lengths))
    metrics["rollout/sequence_tokens_mean"] = mean(
        sum(len(span) for span in t.spans) for t in trajectories
    )
    metrics["rollout/forks"] = mean(t.num_forks for t in trajectories)
    metrics["rollout/lost_members"] = mean(group.num_failed for group in groups)
    metrics["rollout/shrunken_groups"] = float(sum(group.num_failed > 0 for group in groups))
    stops = Counter(str(t.stop_reason) for t in trajectories)
    metrics |= {f"rollout/stop/{r}": n / len(trajectories) for r, n in sorted(stops.items())}
    metrics["rollout/truncated"] = mean(t.stop_reason.is_truncation for t in trajectories)
    for name in ("engine", "env"):
        seconds = (sum(getattr(turn, f"{name}_s") for turn in t.turns) for t in trajectories)
        metrics[f"time/{name}_per_episode_s"] = mean(map(float, seconds))
    env_metrics = merge_means([t.metrics for t in trajectories])
    metrics |= {f"env/{name}": value for name, value in env_metrics.items()}
    lags = Counter[int]()
    for span in (span for t in trajectories for span in t.spans):
        if span.policy_version is not None:
            lags[version - span.policy_version] += len(span)
    metrics |= {f"staleness/{lag}": n / lags.total() for lag, n in sorted(lags.items())}
    return metrics
