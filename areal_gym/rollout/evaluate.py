"""Measuring a policy: pass@1 and pass@k on tasks of a split, with confidence intervals."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areal_gym.agents.base import Agent
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.envs.base import TextEnv
from areal_gym.errors import FailureBudgetError, NothingToDoError
from areal_gym.metrics import Interval, mean, merge_means, pass_at_k, wilson_interval
from areal_gym.rendering import Renderer
from areal_gym.rollout.episode import derive_seed, play_episode
from areal_gym.rollout.pool import EnvPool
from areal_gym.types import Trajectory

__all__ = ["EvalReport", "evaluate"]

_SOLVED = 1.0 - 1e-9
"""A reward of 1 (up to rounding) counts as solved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """What an evaluation found. Failed episodes are counted, and in no other number."""

    env_id: str
    split: str
    num_tasks: int
    num_samples: int
    """Episodes per task that were asked for."""
    pass_at_1: Interval
    pass_at: dict[int, Interval]
    """pass@k for k = 2, 4, ... up to `num_samples`."""
    reward: Interval
    reward_parts: dict[str, float]
    metrics: dict[str, float]
    """The environment's own, per episode."""
    stop_reasons: dict[str, int]
    solved_by_stop_reason: dict[str, int]
    num_failed: int
    """Episodes that infrastructure failed."""
    mean_turns: float
    mean_tokens: float
    """Sampled by the policy."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; keys like `pass@1`, intervals under `KEY_interval`."""
        found: dict[str, Any] = {
            "env": self.env_id,
            "split": self.split,
            "num_tasks": self.num_tasks,
            "num_samples": self.num_samples,
        }
        for key, interval in (
            ("pass@1", self.pass_at_1),
            *((f"pass@{k}", interval) for k, interval in self.pass_at.items()),
            ("reward", self.reward),
        ):
            found[key] = interval.mean
            found[f"{key}_interval"] = [interval.low, interval.high]
        return {
            **found,
            "reward_parts": self.reward_parts,
            "metrics": self.metrics,
            "stop_reasons": self.stop_reasons,
            "solved_by_stop_reason": self.solved_by_stop_reason,
            "num_failed": self.num_failed,
            "mean_turns": self.mean_turns,
            "mean_tokens": self.mean_tokens,
        }

    def to_text(self) -> str:
        """The same for people."""
        lines = [f"{self.env_id}, {self.split}: {self.num_tasks} tasks x {self.num_samples}"]
        for name, interval in (
            ("pass@1", self.pass_at_1),
            *((f"pass@{k}", interval) for k, interval in self.pass_at.items()),
            ("reward", self.reward),
        ):
            lines.append(
                f"  {name:<10}{interval.mean:.3f}  (95%: {interval.low:.3f} to {interval.high:.3f})"
            )
        for name, value in {**self.reward_parts, **self.metrics}.items():
            lines.append(f"  {name:<10}{value:.3f}")
        lines.append(f"  turns     {self.mean_turns:.2f}")
        lines.append(f"  tokens    {self.mean_tokens:.1f}")
        lines.append("  stopped by          episodes   solved")
        for reason, count in sorted(self.stop_reasons.items(), key=lambda pair: -pair[1]):
            solved = self.solved_by_stop_reason.get(reason, 0)
            lines.append(f"    {reason:<18}{count:>8} {solved:>8}")
        if self.num_failed:
            lines.append(f"  {self.num_failed} episodes failed and are in no number above")
        return "\n".join(lines)


async def evaluate(
    make_env: Callable[[], TextEnv],
    agent: Agent,
    engine: Engine,
    renderer: Renderer,
    *,
    split: str = "test",
    num_tasks: int = 512,
    num_samples: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 96,
    max_in_flight: int = 128,
    timeout_s: float | None = 120.0,
    seed: int = 0,
    env_id: str = "env",
    agent_id: str = "chat",
    on_progress: Callable[[int, int], None] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> EvalReport:
    """Play `num_samples` episodes of each of the first `num_tasks` tasks of a split.

    A split that has fewer tasks is played whole. Training may go on meanwhile, on the same engine.

    Raises:
        NothingToDoError: the split is empty.
        FailureBudgetError: every episode failed; says how.
    """
    envs = EnvPool(make_env)
    env = envs.take()
    known = env.num_tasks(split)
    envs.give_back(env)
    num_tasks = num_tasks if known is None else min(num_tasks, known)
    if num_tasks == 0:
        raise NothingToDoError(f"{env_id} has no task in the split {split!r}")
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    slots = asyncio.Semaphore(max_in_flight)
    total = num_tasks * num_samples
    num_done = 0

    async def play(index: int, sample: int) -> Trajectory:
        nonlocal num_done
        async with slots:
            env = envs.take()
            trajectory = await play_episode(
                env,
                agent,
                engine,
                renderer,
                options={"split": split, "index": index},
                seed=derive_seed(seed, index, sample),
                params=params,
                trajectory_id=f"{split}-{index:06d}-{sample}",
                group_id=f"{split}-{index:06d}",
                env_id=env_id,
                agent_id=agent_id,
                timeout_s=timeout_s,
            )
            if not trajectory.stop_reason.is_failure:
                envs.give_back(env)
        num_done += 1
        if on_trajectory is not None:
            on_trajectory(trajectory)
        if on_progress is not None:
            on_progress(num_done, total)
        return trajectory

    jobs = [
        asyncio.create_task(play(index, sample))
        for index in range(num_tasks)
        for sample in range(num_samples)
    ]
    try:
        played = await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    return _report(played, env_id, split, num_tasks, num_samples)


def _report(
    played: Sequence[Trajectory], env_id: str, split: str, num_tasks: int, num_samples: int
) -> EvalReport:
    scored = [t for t in played if not t.stop_reason.is_failure]
    if not scored:
        reasons = Counter(str(t.stop_reason) for t in played)
        raise FailureBudgetError(
            f"all {len(played)} episodes failed "
            f"({', '.join(f'{name} x{n}' for name, n in reasons.items())}); "
            f"the first one: {played[0].error}"
        )
    by_task: dict[str, list[bool]] = {}
    for t in scored:
        by_task.setdefault(t.group_id, []).append(t.reward >= _SOLVED)
    ks = [k for k in (2, 4, 8, 16, 32, 64) if k <= num_samples]
    if num_samples > 1 and num_samples not in ks:
        ks.append(num_samples)
    solved = Counter(str(t.stop_reason) for t in scored if t.reward >= _SOLVED)
    return EvalReport(
        env_id=env_id,
        split=split,
        num_tasks=num_tasks,
        num_samples=num_samples,
        pass_at_1=_over_tasks([sum(hits) / len(hits) for hits in by_task.values()], num_samples),
        pass_at={
            k: _over_tasks(
                [pass_at_k(len(h), sum(h), k) for h in by_task.values() if len(h) >= k], num_samples
            )
            for k in ks
        },
        reward=_normal([mean(t.reward for t in scored if t.group_id == g) for g in by_task])
        if num_samples > 1
        else _normal([t.reward for t in scored]),
        reward_parts=merge_means([t.reward_parts for t in scored]),
        metrics=merge_means([t.metrics for t in scored]),
        stop_reasons=dict(Counter(str(t.stop_reason) for t in played)),
        solved_by_stop_reason=dict(solved),
        num_failed=len(played) - len(scored),
        mean_turns=mean(len(t.turns) for t in scored),
        mean_tokens=mean(t.num_policy_tokens for t in scored),
    )


def _over_tasks(values: list[float], num_samples: int) -> Interval:
    """Tasks are the independent unit: samples of one task are alike."""
    if num_samples == 1:
        return wilson_interval(sum(values), len(values))
    return _normal(values)


def _normal(values: list[float]) -> Interval:
    """Mean with a 95% normal interval."""
    centre = mean(values)
    if len(values) < 2:
        return Interval(centre, centre, centre)
    variance = sum((v - centre) ** 2 for v in values) / (len(values) - 1)
    spread = 1.96 * math.sqrt(variance / len(values))
    return Interval(centre, centre - spread, centre + spread)
