"""The report of an evaluation: pass@1, pass@k, and why episodes ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from areal_gym.episode_roles import rewards_by_role
from areal_gym.types import StopReason, Trajectory
from areal_gym.utils.markup import block, number, pairs, short, table
from areal_gym.utils.statistics import (
    Interval,
    mean,
    mean_interval,
    merge_means,
    pass_at_k_interval,
    pass_hat_k,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvScore:
    """The results of one environment of a mix."""

    num_tasks: int
    pass_at_1: Interval
    reward: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleScore:
    """The results of one role, over the episodes in which it has written."""

    num_episodes: int
    pass_at_1: Interval
    reward: float
    is_fixed: bool
    """Whether a policy other than the measured one played this role."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EvalReport:
    """The results of an evaluation. An episode with at least `success_reward` is a success."""

    env_id: str
    split: str
    policy_versions: tuple[int, ...]
    """Versions that sampled; several if weights were published during the evaluation."""
    temperature: float
    num_tasks: int
    """Tasks with at least one scored episode."""
    num_samples: int
    """Requested episodes per task."""
    num_episodes: int
    """Scored episodes."""
    num_failed: int
    """Episodes that failed; they are excluded from all other numbers."""
    pass_at_k: Mapping[int, Interval]
    """Estimates by k, with 95% intervals over tasks (see `pass_at_k_interval`)."""
    task_versions: tuple[str, ...]
    """Versions of the data set, if its tasks have `task.data["version"]`."""
    pass_hat_k: Mapping[int, float]
    """pass^k by k: the chance that k episodes of one task all succeed, averaged over tasks."""
    reward: float
    reward_parts: Mapping[str, float]
    """Means over the episodes."""
    reward_interval: Interval
    """The mean reward over tasks, with its 95% interval (Student's t on the tasks' means)."""
    metrics: Mapping[str, float]
    """The environment's own metrics, averaged over the episodes that have them."""
    mean_turns: float
    mean_policy_tokens: float
    stop_reasons: Mapping[str, int]
    """All episodes, failures included."""
    errors: Mapping[str, int]
    """How often failed episodes had each error message; the five most common ones."""
    wall_s: float
    by_env: Mapping[str, EnvScore] = field(default_factory=dict)
    """Results of each environment of a mix, by name; empty if it is not a mix."""
    by_role: Mapping[str, RoleScore] = field(default_factory=dict)
    """Results of each role, by name; empty in environments without roles."""
    trajectories: tuple[Trajectory, ...] = field(default=(), repr=False, compare=False)
    """All episodes, ordered by task, with failed ones at the end; not in `to_dict`."""

    @property
    def failures(self) -> list[Trajectory]:
        """Episodes whose retries failed as well."""
        return [t for t in self.trajectories if t.stop_reason.is_failure]

    @property
    def num_unasked(self) -> int:
        """Episodes whose first prompt filled the context, so that the policy was never asked."""
        return sum(
            not t.turns and t.stop_reason is StopReason.MAX_TOKENS for t in self.trajectories
        )

    @property
    def pass_at_1(self) -> Interval:
        """The share of episodes that succeeded."""
        return self.pass_at_k[1]

    def __repr__(self) -> str:
        estimate, low, high = self.pass_at_1
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return (
            f"<EvalReport {short(self.env_id)} {self.split}: pass@1 {estimate:.3f} ({low:.3f} to "
            f"{high:.3f}), {self.num_tasks} tasks x {self.num_samples}{failed}>"
        )

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        intervals = (
            (f"pass@{k}", f"{p.mean:.3f}", f"{p.low:.3f} to {p.high:.3f}")
            for k, p in self.pass_at_k.items()
        )
        numbers = {"reward": self.reward, **self.reward_parts, "turns": self.mean_turns}
        numbers |= {"tokens sampled": self.mean_policy_tokens, **self.metrics}
        shown = {short(name): number(value) for name, value in list(numbers.items())[:30]}
        stops = {f"stopped by {name}": f"{n:,} episodes" for name, n in self.stop_reasons.items()}
        errors = {f"{n} x": short(error, 300) for error, n in self.errors.items()}
        return block(
            repr(self)[1:-1],
            table(("", "mean", "95% interval"), intervals),
            pairs({**shown, **stops}),
            pairs(errors),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, in which `pass@1`, `pass@2`, ... are separate keys."""
        row = {"env": self.env_id} | {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("env_id", "pass_at_k", "pass_hat_k", "trajectories", "reward_interval"):
            del row[name]
        bounds = self.reward_interval[1:]  # infinite with fewer than five tasks
        low, high = (bound if math.isfinite(bound) else None for bound in bounds)
        row |= {"reward_low": low, "reward_high": high}
        row |= {name: list(row[name]) for name in ("task_versions", "policy_versions")}
        for k, interval in self.pass_at_k.items():
            row |= _interval_row(f"pass@{k}", interval)
        row |= {f"pass^{k}": estimate for k, estimate in self.pass_hat_k.items()}
        row["by_env"] = {
            name: {"num_tasks": score.num_tasks, "reward": score.reward}
            | _interval_row("pass@1", score.pass_at_1)
            | {"metrics": dict(score.metrics)}
            for name, score in self.by_env.items()
        }
        row["by_role"] = {
            name: {"num_episodes": score.num_episodes, "reward": score.reward}
            | _interval_row("pass@1", score.pass_at_1)
            | {"is_fixed": score.is_fixed}
            for name, score in self.by_role.items()
        }
        return row

    def to_text(self) -> str:
        """Return the report as a table of text."""
        sampling = f"temperature {self.temperature:g}" if self.temperature > 0 else "greedy"
        version = f" of version {', '.join(self.task_versions)}" if self.task_versions else ""
        lines = [
            f"{self.env_id} {self.split}: {self.num_tasks} tasks{version} x {self.num_samples}, "
            f"{sampling}, {self.wall_s:.1f} s",
            "",
            f"{'':<20}{'mean':>8}   95% interval",
        ]
        lines += [_interval_line(f"pass@{k}", interval) for k, interval in self.pass_at_k.items()]
        lines += [f"{f'pass^{k}':<20}{x:>8.3f}" for k, x in self.pass_hat_k.items() if k > 1]
        lines += [
            f"{_interval_line(f'  pass@1 in {name}', score.pass_at_1)}   {score.num_tasks} tasks"
            for name, score in self.by_env.items()
        ]
        lines += [
            f"{_interval_line(f'  pass@1 of {name}', score.pass_at_1)}   {score.num_episodes} "
            f"episodes{', another policy' if score.is_fixed else ''}"
            for name, score in self.by_role.items()
        ]
        numbers = {"reward": self.reward}
        numbers |= {f"  {name}": value for name, value in self.reward_parts.items()}
        numbers["turns"] = self.mean_turns
        if self.mean_policy_tokens:  # policies that answer in text have no tokens
            numbers["tokens sampled"] = self.mean_policy_tokens
        numbers |= self.metrics
        lines += [f"{name:<20}{value:>8.3f}" for name, value in numbers.items()]
        if math.isfinite(self.reward_interval.low):
            place = next(i for i, line in enumerate(lines) if line.startswith("reward "))
            lines[place] = _interval_line("reward", self.reward_interval)
        lines += ["", f"{'stopped by':<20}{'episodes':>8}{'share':>8}"]
        total = sum(self.stop_reasons.values())
        lines += [f"{r:<20}{n:>8}{n / total:>8.1%}" for r, n in self.stop_reasons.items()]
        if self.num_unasked:
            lines += [
                "",
                f"{self.num_unasked} episodes were over before the policy was asked: "
                "their prompts fill its context",
                "  give them room, if the model has as much: engine.max_context=N",
            ]
        if self.num_failed:
            lines += [
                "",
                f"{self.num_failed} failed episodes are in no other number; their errors:",
            ]
            lines += [f"  {count} x {error}" for error, count in self.errors.items()]
        return "\n".join(lines)


def _interval_row(name: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _interval_line(name: str, interval: Interval) -> str:
    return f"{name:<20}{interval.mean:>8.3f}   {interval.low:.3f} to {interval.high:.3f}"


def make_report(
    trajectories: Sequence[Trajectory], *, num_samples: int, success_reward: float, **facts: Any
) -> EvalReport:
    """Return the report of episodes, `num_samples` per task; `facts` are its other fields."""
    scored = [
        [t for t in trajectories[i : i + num_samples] if not t.stop_reason.is_failure]
        for i in range(0, len(trajectories), num_samples)
    ]
    failed = [t for t in trajectories if t.stop_reason.is_failure]
    episodes = [trajectory for siblings in scored for trajectory in siblings]
    counts = _counts(scored, success_reward)
    env_ids = sorted({t.env_id for t in episodes})
    scores = {}
    for env_id in env_ids if len(env_ids) > 1 else ():
        theirs = [[t for t in siblings if t.env_id == env_id] for siblings in scored]
        own_counts = _counts(theirs, success_reward)
        own = [trajectory for siblings in theirs for trajectory in siblings]
        scores[env_id] = EnvScore(
            num_tasks=len(own_counts),
            pass_at_1=pass_at_k_interval(own_counts, 1, num_samples=num_samples),
            reward=mean(t.reward for t in own),
            metrics=merge_means([t.metrics for t in own]),
        )
    roles = dict.fromkeys(turn.role for t in episodes for turn in t.turns if turn.role)
    ks = sorted({*(2**i for i in range(num_samples.bit_length())), num_samples})
    reasons = Counter(str(t.stop_reason) for t in [*episodes, *failed])
    errors = Counter(t.error or "" for t in failed)
    versions = {str(t.task.data["version"]) for t in episodes if "version" in t.task.data}
    return EvalReport(
        policy_versions=tuple(sorted({v for t in episodes for v in t.policy_versions})),
        task_versions=tuple(sorted(versions)),
        num_tasks=len(counts),
        num_samples=num_samples,
        num_episodes=len(episodes),
        num_failed=len(failed),
        pass_at_k={k: pass_at_k_interval(counts, k, num_samples=num_samples) for k in ks},
        pass_hat_k={k: mean(pass_hat_k(n, c, k) for n, c in counts if n >= k) for k in ks},
        reward=mean(t.reward for t in episodes),
        reward_parts=merge_means([t.reward_parts for t in episodes]),
        reward_interval=mean_interval([mean(t.reward for t in own) for own in scored if own]),
        metrics=merge_means([t.metrics for t in episodes]),
        mean_turns=mean(len(t.turns) for t in episodes),
        mean_policy_tokens=mean(t.num_policy_tokens for t in episodes),
        stop_reasons=dict(reasons.most_common()),
        errors=dict(errors.most_common(5)),
        by_env=scores,
        by_role={role: _role_score(role, scored, num_samples, success_reward) for role in roles},
        trajectories=(*episodes, *failed),
        **facts,
    )


def _role_score(
    role: str, scored: Sequence[Sequence[Trajectory]], num_samples: int, success_reward: float
) -> RoleScore:
    earned = [
        [rewards[role] for rewards in map(rewards_by_role, siblings) if role in rewards]
        for siblings in scored
    ]
    counts = [(len(own), sum(r >= success_reward - 1e-9 for r in own)) for own in earned if own]
    every_turn = (turn for siblings in scored for t in siblings for turn in t.turns)
    return RoleScore(
        num_episodes=sum(map(len, earned)),
        pass_at_1=pass_at_k_interval(counts, 1, num_samples=num_samples),
        reward=mean(reward for own in earned for reward in own),
        is_fixed=any(turn.is_fixed for turn in every_turn if turn.role == role),
    )


def _counts(scored: Sequence[Sequence[Trajectory]], success_reward: float) -> list[tuple[int, int]]:
    return [
        (len(siblings), sum(t.reward >= success_reward - 1e-9 for t in siblings))
        for siblings in scored
        if siblings
    ]
