"""Plays groups of episodes and hands batches of them to the trainer.

    tasks -> [room?] -> running -> [filters] -> ready -> [fresh?] -> batch
               ^           |           |                    |          |
               |           |      rejected             too old         v
               |<----------+-----------+--------------------+       trainer
               +------- version + 1, published to the engine ----------+

`GroupTracker` has the states of groups, `EpisodeScheduler` the slots, `FailurePolicy` the retries.
With `max_staleness = 0` exactly one batch of groups starts per version (plus one group for each
that is dropped), which is the synchronous algorithm.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

from areal_gym.config import RolloutConfig
from areal_gym.envs.task_drawing import draw_task
from areal_gym.errors import EpisodeError, InfrastructureError
from areal_gym.recording import derive_seed, stop_reason_of
from areal_gym.rollout.broken_tasks import BrokenTasks
from areal_gym.rollout.curriculum import Curriculum
from areal_gym.rollout.episode_runners import (
    EnvPool,
    EpisodeRequest,
    EpisodeRunner,
    EpisodeSetup,
    LocalEpisodeRunner,
)
from areal_gym.rollout.failures import FailurePolicy, Outcome, is_infrastructure_failure
from areal_gym.rollout.filters import GroupFilter
from areal_gym.rollout.groups import GroupTracker, RunningGroup
from areal_gym.rollout.journal import Journal
from areal_gym.rollout.lockstep import Lockstep
from areal_gym.rollout.scheduler import EpisodeScheduler
from areal_gym.rollout.stats import RolloutStats
from areal_gym.rollout.task_scheduler import TaskScheduler
from areal_gym.types import Group, StopReason, Task, Trajectory

_TASK, _EPISODE = 0, 1
"""Streams of seeds."""
_POLL_S = 0.02
"""Seconds between checks for a new version, which engines do not announce."""


class RolloutRunner:
    """Plays groups of episodes and hands batches to the trainer; an async context manager.

    Task k of seed s is always the same task, unless a curriculum chooses. Siblings share a task;
    their seeds differ. Nothing runs before the first `next_batch`.

    Args:
        setup: the parts of all episodes. In a resumed run, the engine has the run's version.
        config: sizes and limits.
        seed: seeds tasks, environments and sampling.
        split: the split whose tasks are played.
        curriculum: chooses the options that tasks are drawn with.
        filters: reject complete groups, by name; the first that rejects decides.
        journal: records every group's state. If it holds groups of an interrupted run, they are
            restored, so that complete ones need not be played again.
        on_trajectory: called with every episode that ends, failures included. An exception that it
            raises stops the runner.
        on_dropped_task: called with the id of a task that is dropped, and its verifier's error.
        state: what `state()` of the interrupted run returned. Without it, a run that starts at
            version v continues after the tasks of v whole batches.
        is_deterministic: whether turns are sampled in waves that depend on the seed only (see
            `Lockstep`).
        episode_runner: plays the episodes with its own agent, engine and renderer; by default they
            are played in this process.

    Raises:
        ConfigError: the environment gives the curriculum nothing to choose from, or the engine
            cannot sample given batches.
    """

    def __init__(
        self,
        setup: EpisodeSetup,
        config: RolloutConfig,
        *,
        seed: int = 0,
        split: str = "train",
        curriculum: Curriculum | None = None,
        filters: Mapping[str, GroupFilter] | None = None,
        journal: Journal | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        on_dropped_task: Callable[[str, str], None] | None = None,
        state: Mapping[str, Any] | None = None,
        is_deterministic: bool = False,
        episode_runner: EpisodeRunner | None = None,
    ) -> None:
        self.config = config
        self._seed = seed
        self._split = split
        self._on_trajectory = on_trajectory
        self._scheduler = EpisodeScheduler(config.max_in_flight, self._start_next)
        self._lockstep: Lockstep | None = None
        if is_deterministic:
            self._lockstep = Lockstep(setup.engine, lambda: self._scheduler.num_running)
            setup = replace(setup, engine=self._lockstep)
        self._engine = setup.engine
        self._envs = EnvPool(setup.env_factory)
        self._episodes = episode_runner or LocalEpisodeRunner.for_training(
            setup, config, self._envs
        )
        self.in_flight = self._episodes.in_flight
        version = setup.engine.policy_version
        if curriculum is not None:
            env = self._envs.take()
            curriculum.prepare(env, split)
            self._envs.give_back(env)
        tasks = TaskScheduler(
            seed,
            curriculum,
            lookback=config.batch_groups if config.max_staleness == 0 else None,
            first=version * config.batch_groups,
            state=state or {},
        )
        self._broken = BrokenTasks((state or {}).get("dropped_tasks", ()), on_dropped_task)
        self._groups = GroupTracker(config, tasks, version, filters or {}, journal)
        self._failures = FailurePolicy.for_training(
            config, lambda: getattr(setup.engine, "outage_s", 0.0)
        )
        self._queue: deque[tuple[RunningGroup, int, int]] = deque()
        """Members that wait for a slot: (group, member, round), in the order of their groups."""
        self._has_replays = False
        """Whether members of replayed groups are at the end of the queue."""
        self._counts: Counter[str] = Counter()
        self._num_failed_in_a_row = 0
        """Groups that failed since the last group that did not."""
        self._start_s = time.perf_counter()

    # ---- for the trainer ----------------------------------------------------------------------

    async def next_batch(self) -> list[Group]:
        """Return the next `batch_groups` complete, fresh groups, in the order of their start.

        Only a new version makes room for new groups, so publish one between batches.
        `max_staleness + 1` batches can be taken before that; one more waits.

        Raises:
            FailureBudgetError: too many episodes fail, or no group completes at all.
            TrainError: the filters reject everything, or the journal's disk is full.
            UsageError: the environment cannot serve the request (no such split, ...).
            InfrastructureError: the runner was closed.
        """
        while True:
            self._scheduler.clear_changed()
            batch = self._groups.hand_out(self._engine.policy_version)
            self._scheduler.start_jobs()
            if batch is not None:
                return batch
            await self._scheduler.changed()

    def stats(self) -> RolloutStats:
        """Return a snapshot for metrics and the live display."""
        engine_s, env_s, agent_s = self.in_flight.integrals()
        version = self._engine.policy_version
        groups, failures = self._groups, self._failures
        group_counts = ("started", "accepted", "failed", "stale", "restored")
        episode_counts = ("episodes", "retries", "lost", "replayed_groups", "tokens")
        return RolloutStats(
            policy_version=version,
            elapsed_s=time.perf_counter() - self._start_s,
            episodes_in_flight=self.in_flight.episodes,
            episodes_queued=len(self._queue),
            waiting_on_engine=self.in_flight.engine,
            waiting_on_env=self.in_flight.env,
            waiting_on_agent=self.in_flight.agent,
            groups_running=len(groups.issued) + len(groups.running),
            groups_ready=groups.num_ready,
            oldest_ready_s=groups.oldest_ready_s,
            room=groups.room(version),
            num_groups=groups.counts["handed_out"],
            num_groups_rejected=dict(groups.rejected),
            num_dropped_tasks=len(self._broken.dropped),
            **{f"num_groups_{name}": groups.counts[name] for name in group_counts},
            **{f"num_{name}": self._counts[name] for name in episode_counts},
            outage_s=failures.outage.seconds,
            outage_patience_s=failures.outage.patience_s,
            num_failures=dict(failures.num_failures),
            engine_s=engine_s,
            env_s=env_s,
            agent_s=agent_s,
        )

    def state(self) -> dict[str, Any]:
        """Return, as JSON values, what a resumed run needs to lose no group and repeat none."""
        state = self._groups.state(self._engine.policy_version)
        return {**state, "dropped_tasks": self._broken.dropped} if self._broken.dropped else state

    async def aclose(self) -> None:
        """Cancel all episodes in flight and wait until they have ended. Idempotent."""
        self._scheduler.stop(InfrastructureError("the rollout runner was closed"))
        self._queue.clear()
        await self._scheduler.aclose()
        if self._lockstep is not None:
            await self._lockstep.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # ---- admission ----------------------------------------------------------------------------

    def _start_next(self) -> float:
        """Start a member of a running group, else a new group; see `EpisodeScheduler`."""
        if (hold_s := self._failures.outage.hold_s) > 0:
            return hold_s
        if self._has_replays:
            self._sort_queue()
        if self._queue:
            group, member, round = self._queue.popleft()
            if round == group.round:
                task = self._scheduler.spawn(self._play_member(group, member))
                group.tasks.add(task)
                task.add_done_callback(group.tasks.discard)
            return 0.0
        if self._groups.room(self._engine.policy_version) == 0:
            return _POLL_S
        num_drawing = len(self._groups.issued)
        num_taken = self._scheduler.num_running + num_drawing * (self.config.group_size - 1)
        if num_taken >= self.config.max_in_flight:
            return math.inf
        if self._lockstep is not None and num_drawing:
            return math.inf  # which group is sampled first must not depend on whose draw ends first
        issued = self._groups.issue()
        if issued is None:
            return math.inf
        self._scheduler.spawn(self._open_group(*issued))
        return 0.0

    def _enqueue(self, group: RunningGroup) -> None:
        group.num_completed_before = self._failures.num_completed
        self._queue.extend((group, member, group.round) for member in range(group.size))

    def _sort_queue(self) -> None:
        """Move replayed groups to the front of the queue, because they were started first."""
        self._has_replays = False
        current = [job for job in self._queue if job[2] == job[0].round]
        self._queue = deque(sorted(current, key=lambda job: (job[0].index, job[1])))

    async def _open_group(self, index: int, options: Mapping[str, Any]) -> None:
        task = await self._draw_task(index, options)
        if task is None:
            self._fail_group(index)
        else:
            self._enqueue(self._groups.start(index, task))

    async def _draw_task(self, index: int, options: Mapping[str, Any]) -> Task | None:
        """Return the task of group `index`, or None if the environment fails to give one."""
        options = {"split": self._split, **options}
        task = await self._draw_once(derive_seed(self._seed, _TASK, index), options)
        num_draws = 1
        while task is not None and task.id in self._broken:
            env = self._envs.take()
            self._broken.require_others(num_draws, env.num_tasks(options["split"]))
            self._envs.give_back(env)
            seed = derive_seed(self._seed, _TASK, index, num_draws)
            task = await self._draw_once(seed, options)
            num_draws += 1
        return task

    async def _draw_once(self, seed: int, options: Mapping[str, Any]) -> Task | None:
        task: Task | None = None

        async def attempt(number: int) -> Outcome:
            nonlocal task
            env = self._envs.take()
            try:
                async with asyncio.timeout(self.config.episode_timeout_s):
                    task = await draw_task(env, seed, options)
            except EpisodeError as error:
                return self._failures.record_failure(
                    stop_reason_of(error), str(error), is_lost=error.is_outage
                )
            except TimeoutError:
                return self._failures.record_failure(
                    StopReason.TIMEOUT, "the environment gave no task in time", is_lost=False
                )
            self._envs.give_back(env)
            return Outcome.COMPLETED

        await self._failures.attempt(attempt)
        return task

    # ---- episodes -----------------------------------------------------------------------------

    async def _play_member(self, group: RunningGroup, member: int) -> None:
        round = group.round

        async def attempt(number: int) -> Outcome:
            if group.task.id in self._broken:
                group.is_void = True
                return Outcome.FINAL
            request = EpisodeRequest(
                task=group.task,
                seed=derive_seed(self._seed, _EPISODE, group.index, member, number),
                trajectory_id=group.trajectory_id(member, number),
                group_id=group.id,
            )
            trajectory = await self._episodes.play(request)
            if group.round != round:  # another member's failure has replayed the group
                return Outcome.FINAL
            self._counts["retries"] += number > 0 or round > 0
            return self._record(group, member, trajectory)

        await self._failures.attempt(attempt)
        if group.round == round:
            group.num_open -= 1
            if group.num_open == 0:
                self._finish_group(group)

    def _record(self, group: RunningGroup, member: int, trajectory: Trajectory) -> Outcome:
        self._counts["episodes"] += 1
        self._counts["tokens"] += trajectory.num_policy_tokens
        if self._on_trajectory is not None:
            self._on_trajectory(trajectory)
        self._broken.record(trajectory)
        outcome = self._failures.record(trajectory)
        if group.task.id in self._broken:
            outcome = Outcome.FINAL  # even for siblings that have a reward
        if outcome is Outcome.COMPLETED:
            group.members.append((member, trajectory))
        elif outcome is Outcome.FINAL:
            group.is_void = True  # the siblings alone would select by reward
        self._counts["lost"] += outcome is Outcome.LOST
        if is_infrastructure_failure(trajectory):
            is_lost = trajectory.is_lost
            if group.may_replay(self._failures.num_completed, is_lost=is_lost):
                for replayed in self._groups.interrupt(group, is_lost=is_lost):
                    self._has_replays = True
                    self._counts["replayed_groups"] += 1
                    self._enqueue(replayed)
                budget, outage = self._failures.budget, self._failures.outage
                outage.hold(outage.pause_s if is_lost else budget.pause_s)
                return Outcome.FINAL
            return Outcome.FAILED  # the group is the likely cause, so this attempt costs a retry
        return outcome

    def _finish_group(self, group: RunningGroup) -> None:
        if group.task.id in self._broken:
            self._groups.fail(group.index)
        elif group.is_void or len(group.members) < self.config.min_group_size:
            self._fail_group(group.index)
        else:
            self._num_failed_in_a_row = 0
            self._groups.finish(group)

    def _fail_group(self, index: int) -> None:
        """Drop a group; raise FailureBudgetError if too many in a row have failed."""
        self._groups.fail(index)
        self._num_failed_in_a_row += 1
        budget = self._failures.budget
        is_allowed = self._num_failed_in_a_row < max(8, 2 * self.config.batch_groups)
        if is_allowed or budget.is_outage:  # the budget limits an outage by time
            return
        raise budget.error(
            f"{self._num_failed_in_a_row} groups in a row completed with fewer than "
            f"min_group_size = {self.config.min_group_size} members; "
        )
