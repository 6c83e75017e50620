"""Measures a policy on held-out tasks: pass@1, pass@k, and the reasons why episodes ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from areal_gym.envs.base import TextEnv
from areal_gym.envs.task_drawing import draw_task
from areal_gym.errors import DataError, EpisodeError, NothingToDoError
from areal_gym.recording import derive_seed
from areal_gym.rollout.episode_runners import (
    EnvPool,
    EpisodeRequest,
    LocalEpisodeRunner,
    PlayEpisode,
)
from areal_gym.rollout.eval_report import EvalReport, make_report
from areal_gym.rollout.failures import FailureBudget, FailurePolicy, Outage, Outcome, loop_time
from areal_gym.rollout.scheduler import run_jobs
from areal_gym.types import Task, Trajectory

_TASK, _EPISODE = 2, 3
"""Streams of seeds; streams 0 and 1 belong to the training runner."""


async def measure(
    env_factory: Callable[[], TextEnv],
    play: PlayEpisode,
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
    on_begin: Callable[[int], None] | None = None,
    on_sample: Callable[[int, int, Trajectory], None] | None = None,
    on_outage: Callable[[float, float], None] | None = None,
    kept: Mapping[tuple[int, int], Trajectory] | None = None,
) -> EvalReport:
    """Play tasks 0 to `num_tasks - 1` of a split, `num_samples` episodes each, and report on them.

    Args:
        env_factory: makes one environment instance.
        play: plays one episode.
        temperature: the sampling temperature, for the report.
        split: the split whose tasks are played.
        num_tasks: the number of tasks; a split with fewer tasks is played completely.
        num_samples: episodes per task; pass@k and pass^k are estimated for powers of two up to it.
        max_in_flight: the most episodes at once.
        max_retries, max_failure_rate, outage_patience_s: as in `RolloutConfig`.
        success_reward: an episode with at least this reward counts as a success.
        seed: seeds sampling and the environments.
        env_id: the environment's id, for the report; by default the name of its class.
        on_progress: called with (episodes done, episodes in total).
        on_trajectory: called with every attempt that ends, failures included.
        on_begin: called with the number of episodes, before the first one.
        on_sample: called with a task's index, the sample's number and its last attempt.
        on_outage: called with (seconds, patience) while servers or sandboxes are gone.
        kept: episodes from before, by (task index, sample number), which are not played again.

    Raises:
        DataError: the split's task at some index is not the one that `kept` has an episode of.
        NothingToDoError, UsageError: the split is empty, or the environment does not have it.
        FailureBudgetError: too many episodes failed for the numbers to mean anything.
    """
    start_s = time.perf_counter()
    envs = EnvPool(env_factory)
    tasks = await first_tasks(envs, split, num_tasks, max_in_flight)
    outage = Outage(outage_patience_s, clock=loop_time, on_lost=on_outage)
    budget = FailureBudget(max_failure_rate)
    requests = _requests(seed, tasks, num_samples)
    (on_begin or _ignore)(len(requests))
    trajectories = await play_all(
        *(requests, LocalEpisodeRunner(envs, play)),
        max_in_flight=max_in_flight,
        failures=FailurePolicy(budget, outage, max_retries=max_retries, waits=False),
        on_progress=on_progress,
        on_trajectory=on_trajectory,
        on_done=_by_place(on_sample or _ignore, num_samples),
        done=_places_of(kept or {}, tasks, num_samples),
    )
    if all(trajectory.stop_reason.is_failure for trajectory in trajectories):
        raise budget.error()
    return make_report(
        trajectories,
        env_id=env_id or type(envs.take()).__name__,
        split=split,
        temperature=temperature,
        num_samples=num_samples,
        success_reward=success_reward,
        wall_s=time.perf_counter() - start_s,
    )


def _places_of(
    kept: Mapping[tuple[int, int], Trajectory], tasks: Sequence[Task], num_samples: int
) -> dict[int, Trajectory]:
    places = {}
    for (index, sample), trajectory in kept.items():
        if index >= len(tasks) or trajectory.task.id != tasks[index].id:
            task = tasks[index].id if index < len(tasks) else "no task"
            raise DataError(
                f"task {index} was {trajectory.task.id!r} before, and is now {task!r}",
                hints=["the data have changed: measure anew with --clean, or another --out"],
            )
        places[index * num_samples + sample] = trajectory
    return places


def _requests(
    seed: int, tasks: Sequence[Task], num_samples: int
) -> list[Callable[[int], EpisodeRequest]]:
    return [
        partial(_request, seed, task, index, sample)
        for index, task in enumerate(tasks)
        for sample in range(num_samples)
    ]


def _ignore(*args: object) -> None:
    pass


def _by_place(
    on_sample: Callable[[int, int, Trajectory], None], num_samples: int
) -> Callable[[int, Trajectory], None]:
    return lambda place, trajectory: on_sample(*divmod(place, num_samples), trajectory)


def _request(seed: int, task: Task, index: int, sample: int, attempt: int) -> EpisodeRequest:
    retry = f"-retry{attempt}" if attempt else ""
    return EpisodeRequest(
        task=task,
        seed=derive_seed(seed, _EPISODE, index, sample, attempt),
        trajectory_id=f"eval-{index:06d}-{sample}{retry}",
        group_id=f"eval-{index:06d}",
    )


async def play_all(
    requests: Sequence[Callable[[int], EpisodeRequest]],
    episodes: LocalEpisodeRunner,
    *,
    max_in_flight: int,
    failures: FailurePolicy | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    on_done: Callable[[int, Trajectory], None] | None = None,
    done: Mapping[int, Trajectory] | None = None,
) -> list[Trajectory]:
    """Play a list of episodes; return the last attempt of each, in the order of the list.

    The arguments that are not listed are those of `measure`.

    Args:
        requests: for each episode, a function from the attempt's number to its request.
        episodes: plays one episode.
        failures: decides which failed episodes are tried again; by default none.
        on_done: called with the index and the last attempt of each episode.
        done: episodes that have been played already, by index.

    Raises:
        FailureBudgetError: `failures` ends the evaluation.
    """
    trajectories = dict(done or {})
    num_done = len(trajectories)

    async def play(place: int) -> None:
        nonlocal num_done

        async def attempt(number: int) -> Outcome:
            trajectory = await episodes.play(requests[place](number))
            trajectories[place] = trajectory
            if on_trajectory is not None:
                on_trajectory(trajectory)
            return Outcome.COMPLETED if failures is None else failures.record(trajectory)

        await (attempt(0) if failures is None else failures.attempt(attempt))
        num_done += 1
        if on_done is not None:
            on_done(place, trajectories[place])
        if on_progress is not None:
            on_progress(num_done, len(requests))

    rest = [place for place in range(len(requests)) if place not in trajectories]
    await run_jobs((partial(play, place) for place in rest), max_in_flight)
    return [trajectories[place] for place in range(len(requests))]


async def first_tasks(envs: EnvPool, split: str, num_tasks: int, max_in_flight: int) -> list[Task]:
    """Return the first tasks of the split, or all if it has fewer; they depend on no seed.

    Raises:
        EpisodeError: the environment failed to reset three times in a row.
        NothingToDoError: the split is empty.
        UsageError: the environment has no such split.
    """
    env = envs.take()
    limit = env.num_tasks(split)
    num_slots = max_in_flight if env.prepares else 1
    envs.give_back(env)
    if limit is not None:
        num_tasks = min(num_tasks, limit)
    tasks: dict[int, Task] = {}

    async def draw(index: int) -> None:
        env = envs.take()
        options = {"split": split, "index": index}
        for is_last in (False, False, True):
            try:
                tasks[index] = await draw_task(env, derive_seed(_TASK, index), options)
                break
            except EpisodeError:
                if is_last:
                    raise
        envs.give_back(env)

    await run_jobs((partial(draw, index) for index in range(num_tasks)), num_slots)
    if not tasks:
        raise NothingToDoError(
            f"the split {split!r} has no tasks to evaluate on",
            hints=["take another one (eval.split=NAME), or larger data"],
        )
    return [tasks[index] for index in range(num_tasks)]
