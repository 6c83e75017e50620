"""Measure a policy on held-out tasks: pass@1, pass@k, and why episodes ended as they did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from areal_gym.agents.base import Agent
from areal_gym.chat import Renderer
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.envs.base import TextEnv
from areal_gym.errors import EpisodeError, FailureBudgetError, NothingToDoError
from areal_gym.recording import derive_seed
from areal_gym.rollout.env_pool import EnvPool
from areal_gym.rollout.episode import play_episode
from areal_gym.rollout.eval_report import EvalReport, make_report
from areal_gym.rollout.failures import FailureBudget
from areal_gym.rollout.outages import Outage
from areal_gym.types import StopReason, Task, Trajectory

_TASK, _EPISODE = 2, 3
"""Streams of seeds; 0 and 1 are the training runner's."""


class Play(Protocol):
    """Plays one episode by some policy; failures are recorded in the trajectory, not raised."""

    async def __call__(
        self,
        env: TextEnv,
        *,
        task: Task,
        seed: int,
        trajectory_id: str,
        group_id: str,
        env_id: str | None,
    ) -> Trajectory:
        """What happened. `env` belongs to the episode while it lasts."""
        ...


async def evaluate(
    env_factory: Callable[[], TextEnv],
    agent: Agent,
    engine: Engine,
    renderer: Renderer,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int = 96,
    timeout_s: float = 120.0,
    agent_id: str = "chat",
    **options: Any,
) -> EvalReport:
    """`measure` the policy of an engine.

    Args:
        env_factory: makes one environment instance.
        agent: one object that plays all episodes.
        engine: started already; it may serve others meanwhile.
        renderer: messages to ids.
        temperature: 0 is greedy.
        top_p: sample from the likeliest tokens that make up this much.
        top_k: sample from this many of the likeliest tokens; 0 is all.
        max_new_tokens: per turn.
        timeout_s: wall-clock limit of one episode.
        agent_id: the agent's registered id.
        options: see `measure`.

    Raises:
        GymError: see `measure`.
    """
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k
    )

    async def play(env: TextEnv, *, task: Task, **names: Any) -> Trajectory:
        return await play_episode(
            env,
            agent,
            engine,
            renderer,
            options={"task": task},
            params=params,
            agent_id=agent_id,
            timeout_s=timeout_s,
            **names,
        )

    return await measure(env_factory, play, temperature=temperature, **options)


async def measure(
    env_factory: Callable[[], TextEnv],
    play: Play,
    *,
    temperature: float,
    split: str = "test",
    num_tasks: int = 512,
    num_samples: int = 1,
    max_in_flight: int = 128,
    max_retries: int = 1,
    max_failure_rate: float = 0.5,
    outage_patience_s: float = 600.0,
    success_reward: float = 1.0,
    seed: int = 0,
    env_id: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> EvalReport:
    """Play tasks 0 to `num_tasks - 1` of the split, `num_samples` episodes each.

    The tasks depend on the split only; a split with fewer tasks than asked for is played whole.

    Args:
        env_factory: makes one environment instance.
        play: plays one episode.
        temperature: that it samples with, for the report.
        split: whose tasks.
        num_tasks: how many tasks at most.
        num_samples: episodes per task; pass@k and pass^k are estimated for powers of two up to it.
        max_in_flight: episodes played at once.
        max_retries: how often a failed episode is played again.
        max_failure_rate: above this share of failures the evaluation stops.
        outage_patience_s: how long servers, workers or sandboxes may be gone before it stops.
        success_reward: the reward from which on an episode counts as a success.
        seed: of sampling and of the environment's own chance.
        env_id: the environment's registered id.
        on_progress: called with (episodes done, episodes in all).
        on_trajectory: sees every episode that ends, failures included.

    Raises:
        NothingToDoError: the split has no tasks.
        FailureBudgetError: too many episodes fail for the numbers to mean anything.
        UsageError: the environment has no such split.
    """
    start_s = time.perf_counter()
    envs = EnvPool(env_factory)
    tasks = await first_tasks(envs, split, num_tasks, max_in_flight)
    jobs = ((index, sample) for index in range(len(tasks)) for sample in range(num_samples))
    total = len(tasks) * num_samples
    budget = FailureBudget(max_failure_rate)
    outage = Outage(outage_patience_s, clock=asyncio.get_running_loop().time)
    scored: list[list[Trajectory]] = [[] for _ in tasks]
    failed: list[Trajectory] = []
    num_done = 0

    async def play_one(index: int, sample: int, attempt: int) -> Trajectory:
        env = envs.take()
        trajectory = await play(
            env,
            task=tasks[index],
            seed=derive_seed(seed, _EPISODE, index, sample, attempt),
            trajectory_id=f"eval-{index:06d}-{sample}" + (f"-retry{attempt}" if attempt else ""),
            group_id=f"eval-{index:06d}",
            env_id=env_id,
        )
        if not trajectory.stop_reason.is_failure:
            envs.give_back(env)
        if on_trajectory is not None:
            on_trajectory(trajectory)
        if not trajectory.is_lost:
            budget.record(trajectory.stop_reason, trajectory.error)
            outage.came_through()
        return trajectory

    async def work() -> None:
        nonlocal num_done
        for index, sample in jobs:
            attempt = 0
            while attempt <= max_retries:
                trajectory = await play_one(index, sample, attempt)
                if trajectory.is_lost:
                    outage.lost(trajectory.error)
                    await asyncio.sleep(outage.pause_s)
                    continue
                attempt += 1
                if not trajectory.stop_reason.is_failure:
                    scored[index].append(trajectory)
                    break
                if trajectory.stop_reason is StopReason.REWARD_ERROR:
                    attempt = max_retries + 1  # another try would select by reward
            else:
                failed.append(trajectory)
            num_done += 1
            if on_progress is not None:
                on_progress(num_done, total)

    await run_all([work() for _ in range(min(max_in_flight, total))])
    if len(failed) == total:
        raise FailureBudgetError(budget.describe(), hints=budget.hints())
    return make_report(
        scored,
        failed,
        env_id=env_id or type(envs.take()).__name__,
        split=split,
        temperature=temperature,
        num_samples=num_samples,
        success_reward=success_reward,
        wall_s=time.perf_counter() - start_s,
    )


async def first_tasks(envs: EnvPool, split: str, num_tasks: int, max_in_flight: int) -> list[Task]:
    """The first tasks of the split, or all when there are fewer: the same ones for everybody.

    Raises:
        NothingToDoError: there are none.
        UsageError: the environment has no such split.
    """
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
            await _reset(env, derive_seed(_TASK, index), {"split": split, "index": index})
            tasks[index] = env.task
            await asyncio.sleep(0)  # who trains meanwhile has its turn
        envs.give_back(env)

    await run_all([draw() for _ in range(min(max_in_flight, num_tasks) if env.prepares else 1)])
    if not tasks:
        raise NothingToDoError(
            f"the split {split!r} has no tasks to evaluate on",
            hints=["take another one (eval.split=NAME), or larger data"],
        )
    return [task for task in tasks if task is not None]


async def _reset(env: TextEnv, seed: int, options: dict[str, Any]) -> None:
    """Reset an environment; one that fails is tried again a few times.

    Raises:
        EpisodeError: it failed each time.
        UsageError: it has no such split.
    """
    for is_last in (False, False, True):
        try:
            await env.areset(seed=seed, options=options)
            return
        except EpisodeError:
            if is_last:
                raise


async def run_all(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first error cancels the others, waits for them and is raised as it is."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
