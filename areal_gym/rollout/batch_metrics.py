"""Metrics of one batch of groups: rewards, lengths, stop reasons, staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from areal_gym.types import Group, Trajectory
from areal_gym.utils.statistics import mean, merge_means, pass_at_k

_SUCCESS = 1.0 - 1e-9


def batch_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return means over the trajectories of a batch that is about to be trained on.

    `version` is that of the weights that will be trained: staleness is counted from it.
    docs/metrics.md describes the metrics.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    parts = merge_means([t.reward_parts for t in trajectories])
    metrics = {f"reward/part/{name}": value for name, value in parts.items()}
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
    for name in ("engine", "env"):
        seconds = (sum(getattr(turn, f"{name}_s") for turn in t.turns) for t in trajectories)
        metrics[f"time/{name}_per_episode_s"] = mean(map(float, seconds))
    own = merge_means([t.metrics for t in trajectories])
    metrics |= {f"env/{name}": value for name, value in own.items()}
    lags = Counter[int]()
    for span in (span for t in trajectories for span in t.spans):
        if span.policy_version is not None:
            lags[version - span.policy_version] += len(span)
    metrics |= {f"staleness/{lag}": n / lags.total() for lag, n in sorted(lags.items())}
    return metrics
