"""Measure a policy on held-out tasks: pass@1, pass@k, and why episodes ended as they did."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_gym.agents.base import Agent
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.envs.base import TextEnv
from areal_gym.errors import FailureBudgetError, NothingToDoError
from areal_gym.metrics import Interval, mean, merge_means, pass_at_k, pass_hat_k, wilson_interval
from areal_gym.rendering import Renderer
from areal_gym.rollout.episode import derive_seed, play_episode
from areal_gym.rollout.failures import FailureBudget
from areal_gym.rollout.pool import EnvPool
from areal_gym.types import Task, Trajectory

__all__ = ["EnvScore", "EvalReport", "evaluate"]

_TASK, _EPISODE = 2, 3
"""Streams of seeds; 0 and 1 are the training runner's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvScore:
    """How one environment of a mix went."""

    num_tasks: int
    pass_at_1: Interval
    reward: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """What an evaluation found. An episode succeeds when its reward reaches `success_reward`."""

    env_id: str
    split: str
    policy_versions: tuple[int, ...]
    """Versions that sampled; more than one when weights were published meanwhile."""
    temperature: float
    num_tasks: int
    """Tasks with at least one scored episode."""
    num_samples: int
    """Episodes per task that were asked for."""
    num_episodes: int
    """Scored episodes."""
    num_failed: int
    """Episodes that infrastructure failed; excluded from every number but this one."""
    pass_at_k: Mapping[int, Interval]
    """Estimates with 95% intervals over tasks (see `pass_at_k_interval`)."""
    task_versions: tuple[str, ...]
    """Of the data set, where tasks say so in `task.data["version"]`."""
    pass_hat_k: Mapping[int, float]
    """pass^k: the chance that all of k episodes of one task succeed, mean over the tasks."""
    reward: float
    reward_parts: Mapping[str, float]
    """Means over the episodes."""
    metrics: Mapping[str, float]
    """The environment's own measurements, means over the episodes that have them."""
    mean_turns: float
    mean_policy_tokens: float
    stop_reasons: Mapping[str, int]
    """All episodes, failures included."""
    errors: Mapping[str, int]
    """The most common error messages of failed episodes, at most five."""
    wall_s: float
    by_env: Mapping[str, EnvScore] = field(default_factory=dict)
    """For each environment of a mix, by name; empty when there is one only."""

    @property
    def pass_at_1(self) -> Interval:
        """The share of episodes that succeed."""
        return self.pass_at_k[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain and JSON-ready; `pass@1` and the like are keys of their own."""
        row: dict[str, Any] = {
            "env": self.env_id,
            "split": self.split,
            "task_versions": list(self.task_versions),
            "policy_versions": list(self.policy_versions),
            "temperature": self.temperature,
            "num_tasks": self.num_tasks,
            "num_samples": self.num_samples,
            "num_episodes": self.num_episodes,
            "num_failed": self.num_failed,
        }
        for k, interval in self.pass_at_k.items():
            row[f"pass@{k}"] = interval.mean
            row[f"pass@{k}_low"] = interval.low
            row[f"pass@{k}_high"] = interval.high
        row |= {f"pass^{k}": estimate for k, estimate in self.pass_hat_k.items()}
        return row | {
            "reward": self.reward,
            "reward_parts": dict(self.reward_parts),
            "metrics": dict(self.metrics),
            "mean_turns": self.mean_turns,
            "mean_policy_tokens": self.mean_policy_tokens,
            "stop_reasons": dict(self.stop_reasons),
            "errors": dict(self.errors),
            "wall_s": self.wall_s,
            "by_env": {
                name: {
                    "num_tasks": score.num_tasks,
                    "pass@1": score.pass_at_1.mean,
                    "pass@1_low": score.pass_at_1.low,
                    "pass@1_high": score.pass_at_1.high,
                    "reward": score.reward,
                    "metrics": dict(score.metrics),
                }
                for name, score in self.by_env.items()
            },
        }

    def to_text(self) -> str:
        """A table for people."""
        how = f"temperature {self.temperature:g}" if self.temperature > 0 else "greedy"
        version = f" of version {', '.join(self.task_versions)}" if self.task_versions else ""
        lines = [
            f"{self.env_id} {self.split}: {self.num_tasks} tasks{version} x {self.num_samples}, "
            f"{how}, "
            f"{self.wall_s:.1f} s",
            "",
            f"{'':<20}{'mean':>8}   95% interval",
        ]
        for k, (estimate, low, high) in self.pass_at_k.items():
            lines.append(f"{f'pass@{k}':<20}{estimate:>8.3f}   {low:.3f} to {high:.3f}")
        lines += [f"{f'pass^{k}':<20}{x:>8.3f}" for k, x in self.pass_hat_k.items() if k > 1]
        for name, score in self.by_env.items():
            low, high = score.pass_at_1.low, score.pass_at_1.high
            lines.append(
                f"{f'  pass@1 in {name}':<20}{score.pass_at_1.mean:>8.3f}   {low:.3f} to {high:.3f}"
                f"   {score.num_tasks} tasks"
            )
        numbers = {"reward": self.reward}
        numbers |= {f"  {name}": value for name, value in self.reward_parts.items()}
        numbers |= {"turns": self.mean_turns, "tokens sampled": self.mean_policy_tokens}
        numbers |= self.metrics
        lines += [f"{name:<20}{value:>8.3f}" for name, value in numbers.items()]
        lines += ["", f"{'stopped by':<20}{'episodes':>8}{'share':>8}"]
        total = sum(self.stop_reasons.values())
        for reason, count in self.stop_reasons.items():
            lines.append(f"{reason:<20}{count:>8}{count / total:>8.1%}")
        if self.num_failed:
            lines += [
                "",
                f"{self.num_failed} failed episodes are in no other number; their errors:",
            ]
            lines += [f"  {count} x {error}" for error, count in self.errors.items()]
        return "\n".join(lines)


async def evaluate(
    env_factory: Callable[[], TextEnv],
    agent: Agent,
    engine: Engine,
    renderer: Renderer,
    *,
    split: str = "test",
    num_tasks: int = 512,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int = 96,
    max_in_flight: int = 128,
    timeout_s: float = 120.0,
    max_retries: int = 1,
    max_failure_rate: float = 0.5,
    success_reward: float = 1.0,
    seed: int = 0,
    env_id: str | None = None,
    agent_id: str = "chat",
    on_progress: Callable[[int, int], None] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> EvalReport:
    """Play tasks 0 to `num_tasks - 1` of the split, `num_samples` episodes each.

    It runs beside anything else that uses the engine. The tasks depend on the split only; a split
    with fewer tasks than asked for is played whole.

    Args:
        env_factory: makes one environment instance.
        agent: one object that plays all episodes.
        engine: started already.
        renderer: messages to ids.
        split: whose tasks.
        num_tasks: how many tasks at most.
        num_samples: episodes per task; pass@k and pass^k are estimated for powers of two up to it.
        temperature: 0 is greedy.
        top_p: sample from the likeliest tokens that make up this much.
        top_k: sample from this many of the likeliest tokens; 0 is all.
        max_new_tokens: per turn.
        max_in_flight: episodes played at once.
        timeout_s: wall-clock limit of one episode.
        max_retries: how often a failed episode is played again.
        max_failure_rate: above this share of failures the evaluation stops.
        success_reward: the reward from which on an episode counts as a success.
        seed: of sampling and of the environment's own chance.
        env_id: the environment's registered id.
        agent_id: the agent's registered id.
        on_progress: called with (episodes done, episodes in all).
        on_trajectory: sees every episode that ends, failures included.

    Raises:
        NothingToDoError: the split has no tasks.
        FailureBudgetError: too many episodes fail for the numbers to mean anything.
        UsageError: the environment has no such split.
    """
    start_s = time.perf_counter()
    envs = EnvPool(env_factory)
    tasks = await _tasks(envs, split, num_tasks, max_in_flight)
    jobs = ((index, sample) for index in range(len(tasks)) for sample in range(num_samples))
    total = len(tasks) * num_samples
    budget = FailureBudget(max_failure_rate)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k
    )
    scored: list[list[Trajectory]] = [[] for _ in tasks]
    failed: list[Trajectory] = []
    num_done = 0

    async def play(index: int, sample: int, attempt: int) -> Trajectory:
        env = envs.take()
        trajectory = await play_episode(
            env,
            agent,
            engine,
            renderer,
            options={"task": tasks[index]},
            seed=derive_seed(seed, _EPISODE, index, sample, attempt),
            params=params,
            trajectory_id=f"eval-{index:06d}-{sample}" + (f"-retry{attempt}" if attempt else ""),
            group_id=f"eval-{index:06d}",
            env_id=env_id,
            agent_id=agent_id,
            timeout_s=timeout_s,
        )
        if not trajectory.stop_reason.is_failure:
            envs.give_back(env)
        if on_trajectory is not None:
            on_trajectory(trajectory)
        budget.record(trajectory.stop_reason, trajectory.error)
        return trajectory

    async def work() -> None:
        nonlocal num_done
        for index, sample in jobs:
            for attempt in range(1 + max_retries):
                trajectory = await play(index, sample, attempt)
                if not trajectory.stop_reason.is_failure:
                    scored[index].append(trajectory)
                    break
            else:
                failed.append(trajectory)
            num_done += 1
            if on_progress is not None:
                on_progress(num_done, total)

    await _gather([work() for _ in range(min(max_in_flight, total))])
    if len(failed) == total:
        raise FailureBudgetError(budget.describe(), hints=budget.hints())
    return _report(
        scored,
        failed,
        env_id=env_id or type(envs.take()).__name__,
        split=split,
        temperature=temperature,
        num_samples=num_samples,
        success_reward=success_reward,
        wall_s=time.perf_counter() - start_s,
    )


async def _tasks(envs: EnvPool, split: str, num_tasks: int, max_in_flight: int) -> list[Task]:
    """The first tasks of the split: the same ones whatever the evaluation's seed."""
    env = envs.take()
    limit = env.num_tasks(split)
    envs.give_back(env)
    if limit is not None:
        num_tasks = min(num_tasks, limit)
    tasks: list[Task | None] = [None] * num_tasks
    left = iter(range(num_tasks))

    async def draw() -> None:
        env = envs.take()
        for index in left:
            await env.areset(
                seed=derive_seed(_TASK, index), options={"split": split, "index": index}
            )
            tasks[index] = env.task
            await asyncio.sleep(0)  # who trains meanwhile has its turn
        envs.give_back(env)

    await _gather([draw() for _ in range(min(max_in_flight, num_tasks) if env.prepares else 1)])
    if not tasks:
        raise NothingToDoError(f"the split {split!r} has no tasks to evaluate on")
    return [task for task in tasks if task is not None]


async def _gather(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error cancels the others, waits for them and is raised as it is."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pass_at_k_interval(counts: Sequence[tuple[int, int]], k: int, *, num_samples: int) -> Interval:
    """pass@k with a 95% interval over tasks.

    Samples of one task are not independent, so the score interval is taken with as many trials as
    independent ones would be needed for the variance that is seen between tasks.

    Args:
        counts: for each task, (scored episodes, successes).
        k: tasks with fewer episodes are left out.
        num_samples: episodes per task that were asked for.
    """
    estimates = [pass_at_k(n, c, k) for n, c in counts if n >= k]
    if not estimates:
        return Interval(math.nan, 0.0, 1.0)
    p = mean(estimates)
    variance = mean((estimate - p) ** 2 for estimate in estimates)
    num_trials = float(len(estimates))
    if 0 < p < 1:  # at the ends the variance says nothing: one trial per task
        num_independent = num_trials * p * (1 - p) / variance if variance > 0 else math.inf
        num_trials = min(num_trials * num_samples, num_independent)
    return wilson_interval(p * num_trials, num_trials)


def _report(
    scored: Sequence[Sequence[Trajectory]],
    failed: Sequence[Trajectory],
    *,
    num_samples: int,
    success_reward: float,
    **facts: Any,
) -> EvalReport:
    episodes = [trajectory for siblings in scored for trajectory in siblings]
    counts = _counts(scored, success_reward)
    scores = {
        name: _score(
            [[t for t in siblings if t.env_id == name] for siblings in scored],
            num_samples,
            success_reward,
        )
        for name in sorted({t.env_id for t in episodes})
    }
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples]
    ks = sorted({*powers, num_samples})
    reasons = Counter(str(t.stop_reason) for t in [*episodes, *failed])
    errors = Counter(t.error or "" for t in failed)
    return EvalReport(
        policy_versions=tuple(sorted({v for t in episodes for v in t.policy_versions})),
        task_versions=tuple(
            sorted({str(t.task.data["version"]) for t in episodes if "version" in t.task.data})
        ),
        num_tasks=len(counts),
        num_samples=num_samples,
        num_episodes=len(episodes),
        num_failed=len(failed),
        pass_at_k={k: pass_at_k_interval(counts, k, num_samples=num_samples) for k in ks},
        pass_hat_k={k: mean(pass_hat_k(n, c, k) for n, c in counts if n >= k) for k in ks},
        reward=mean(t.reward for t in episodes),
        reward_parts=merge_means([t.reward_parts for t in episodes]),
        metrics=merge_means([t.metrics for t in episodes]),
        mean_turns=mean(len(t.turns) for t in episodes),
        mean_policy_tokens=mean(t.num_policy_tokens for t in episodes),
        stop_reasons=dict(reasons.most_common()),
        errors=dict(errors.most_common(5)),
        by_env=scores if len(scores) > 1 else {},
        **facts,
    )


def _score(
    scored: Sequence[Sequence[Trajectory]], num_samples: int, success_reward: float
) -> EnvScore:
    theirs = [siblings for siblings in scored if siblings]
    episodes = [trajectory for siblings in theirs for trajectory in siblings]
    return EnvScore(
        num_tasks=len(theirs),
        pass_at_1=pass_at_k_interval(_counts(theirs, success_reward), 1, num_samples=num_samples),
        reward=mean(t.reward for t in episodes),
        metrics=merge_means([t.metrics for t in episodes]),
    )


def _counts(scored: Sequence[Sequence[Trajectory]], success_reward: float) -> list[tuple[int, int]]:
    """For each task, scored episodes and successes."""
    return [
        (len(siblings), sum(t.reward >= success_reward - 1e-9 for t in siblings))
        for siblings in scored
        if siblings
    ]
