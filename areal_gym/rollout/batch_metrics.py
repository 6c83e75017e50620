"""Metrics of one batch of groups: rewards, lengths, stop reasons, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from areal_gym.types import Group, Trajectory
from areal_gym.utils.statistics import mean, merge_means, pass_at_k

_SUCCESS = 1.0 - 1e-9


def batch_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return means over the trajectories of a batch that is about to be trained on.

    Args:
        groups: the batch.
        version: the version of the weights that will be trained; staleness is counted from it.

    Returns:
        `reward/...` (named parts, by environment, pass@1 and pass@k for the smallest group's size),
        `rollout/...` (tokens, turns, truncation, stop reasons, forks), `env/...` (the environment's
        own), and `staleness/N`, the share of tokens that lag N versions behind.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    metrics = {
        f"reward/part/{name}": value
        for name, value in merge_means([t.reward_parts for t in trajectories]).items()
    }
    by_env: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_env.setdefault(trajectory.env_id, []).append(trajectory)
    for id, theirs in sorted(by_env.items()):
        metrics[f"reward/env/{id}"] = mean(t.reward for t in theirs)
        if len(by_env) > 1:
            metrics[f"rollout/share/{id}"] = len(theirs) / len(trajectories)
            own = merge_means([t.metrics for t in theirs])
            metrics |= {f"env/{id}/{name}": value for name, value in own.items()}
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
    metrics["time/engine_per_episode_s"] = mean(_seconds(t, "engine_s") for t in trajectories)
    metrics["time/env_per_episode_s"] = mean(_seconds(t, "env_s") for t in trajectories)
    own = merge_means([t.metrics for t in trajectories])
    metrics |= {f"env/{name}": value for name, value in own.items()}
    lags = Counter[int]()
    for trajectory in trajectories:
        for span in trajectory.spans:
            if span.policy_version is not None:
                lags[version - span.policy_version] += len(span)
    total = lags.total()
    metrics |= {f"staleness/{lag}": n / total for lag, n in sorted(lags.items())}
    return metrics


def _seconds(trajectory: Trajectory, name: str) -> float:
    return sum(float(getattr(turn, name)) for turn in trajectory.turns)
