"""Many episodes at once, delivered to the trainer as batches of groups.

    tasks -> [admit] -> episodes in flight -> [complete] -> [filters] -> buffer -> [fresh?] -> batch
               ^        a slot waits for                       |                      |          |
               |        engine, env or agent        rejected, counted     too old, counted       v
               |<------------ another starts in its place <----+----------------------+      trainer
               +------------ version + 1, published to the engine -------------------------------+

    admit     waits for  a free slot, and room under the staleness limit (`AdmissionControl`)
              unblocked  by an episode that ends, by a new version
    batch     waits for  `batch_groups` complete groups
              unblocked  by a group that completes

There is one code path. With `max_staleness = 0` exactly one batch of groups is started per version
(and one more for each that is dropped), and taken in the order in which it was started: the
synchronous algorithm.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from operator import itemgetter
from typing import Any, Self

from areal_gym.agents.base import Agent
from areal_gym.chat import Renderer
from areal_gym.config import RolloutConfig
from areal_gym.engines.base import Engine
from areal_gym.envs.base import TextEnv
from areal_gym.errors import (
    ConfigError,
    EpisodeError,
    FailureBudgetError,
    InfrastructureError,
)
from areal_gym.recording import derive_seed
from areal_gym.rollout.curriculum import Curriculum
from areal_gym.rollout.env_pool import EnvPool
from areal_gym.rollout.episode import stop_reason_of
from areal_gym.rollout.episode_runners import EpisodeRequest, EpisodeRunner, LocalEpisodeRunner
from areal_gym.rollout.failures import FailureBudget
from areal_gym.rollout.filters import GroupFilter
from areal_gym.rollout.group_tracker import GroupTracker
from areal_gym.rollout.journal import Journal
from areal_gym.rollout.lockstep import Lockstep, TogetherEngine
from areal_gym.rollout.outages import Outage, Suspects, is_infrastructure_failure
from areal_gym.rollout.running import RunningGroup
from areal_gym.rollout.stats import RolloutStats
from areal_gym.rollout.task_scheduler import TaskScheduler
from areal_gym.types import Group, StopReason, Task, Trajectory

_TASK, _EPISODE = 0, 1
"""Streams of seeds."""
_POLL_S = 0.02
"""Engines do not announce a new version; while only that can unblock us, we look this often."""
_AT_A_TIME = 64
"""Episodes that start before the event loop may do something else; each takes it 0.1 ms."""
_MAX_REPLAYS = 4
"""How often a group is played again, whole, that the infrastructure fails while others come
through. Beyond that it is the group that breaks it, and its members fail one by one."""
_WAVES = 4
"""The failure budget looks at this many times the episodes in flight: one failing server fails
them all, and then once more those that are tried again at once."""


class RolloutRunner:
    """The trainer's source of batches. Use it as an asynchronous context manager.

    Task k of seed s is always the same task, unless a curriculum chooses. Siblings share the task;
    their seeds differ.
    """

    def __init__(
        self,
        env_factory: Callable[[], TextEnv],
        agent: Agent,
        engine: Engine,
        renderer: Renderer,
        config: RolloutConfig,
        *,
        seed: int = 0,
        split: str = "train",
        env_id: str | None = None,
        agent_id: str = "chat",
        filters: Mapping[str, GroupFilter] | None = None,
        curriculum: Curriculum | None = None,
        journal: Journal | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        state: Mapping[str, Any] | None = None,
        is_deterministic: bool = False,
        player: EpisodeRunner | None = None,
    ) -> None:
        """Nothing runs until the first `next_batch`.

        Args:
            env_factory: makes one environment instance.
            agent: one object that plays all episodes; its state is shared by them.
            engine: started already. A resumed run's engine has its version already.
            renderer: messages to ids.
            config: sizes and limits.
            seed: of tasks, environments and sampling.
            split: whose tasks are trained on.
            env_id: the environment's registered id.
            agent_id: the agent's registered id.
            filters: which complete groups are not trained on, by name; the first that rejects
                decides.
            curriculum: chooses the options that tasks are drawn with.
            journal: keeps what becomes of every group. One that an interrupted run has left is
                taken over: its complete groups need not be played again.
            on_trajectory: sees every episode that ends, failures included. What it raises stops
                the runner.
            state: what `state()` of the interrupted run gave. Without it, a run that starts at
                version v goes on after the tasks of v whole batches.
            is_deterministic: sample in waves that depend on the seed only (see `Lockstep`).
            player: plays the episodes, with an agent, an engine and a renderer of its own; without
                one they are played here.

        Raises:
            ConfigError: the environment gives the curriculum nothing to choose from, or the engine
                samples in batches of its own choice only.
        """
        self.config = config
        self._engine = engine
        self._lockstep: Lockstep | None = None
        if is_deterministic:
            self._engine = self._lockstep = _lockstep(engine, lambda: len(self._tasks))
        self._envs = EnvPool(env_factory)
        self._player = player or LocalEpisodeRunner(
            self._envs, agent, self._engine, renderer, config, env_id=env_id, agent_id=agent_id
        )
        self.in_flight = self._player.in_flight
        self._seed = seed
        self._split = split
        self._on_trajectory = on_trajectory
        if curriculum is not None:
            env = self._envs.take()
            curriculum.prepare(env, split)
            self._envs.give_back(env)
        version = engine.policy_version
        issuer = TaskScheduler(
            seed,
            curriculum,
            lookback=config.batch_groups if config.max_staleness == 0 else None,
            first=version * config.batch_groups,
            state=state or {},
        )
        self._ledger = GroupTracker(config, issuer, version, filters or {}, journal)
        self._budget = FailureBudget(
            config.max_failure_rate,
            window=max(64, _WAVES * config.max_in_flight),
            clock=lambda: asyncio.get_running_loop().time(),
        )
        self._outage = Outage(
            config.outage_patience_s,
            clock=lambda: asyncio.get_running_loop().time(),
            engine_outage_s=lambda: getattr(engine, "outage_s", 0.0),
        )
        self._suspects: Suspects | None = None
        """While it is not known how much an outage has hit, no batch is handed out."""
        self._drawing: set[int] = set()
        """Groups whose task is not known yet; each holds a slot."""
        self._running: dict[int, RunningGroup] = {}
        self._jobs: deque[tuple[RunningGroup, int, int]] = deque()
        """Members that wait for a slot: (group, member, round); first started first."""
        self._has_replays = False
        """Groups that are played again have put their jobs at the end of the queue."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake: asyncio.Handle | None = None
        self._admits_soon = False
        """Many tasks that end at once start what follows some at a time, not each its own."""
        self._changed = asyncio.Event()
        self._fatal: BaseException | None = None
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._num_failed_in_a_row = 0
        self._num_came_through = 0
        """Episodes that ended as they should."""
        self._start_s = time.perf_counter()

    # ---- the trainer's side -------------------------------------------------------------------

    async def next_batch(self) -> list[Group]:
        """The next `batch_groups` complete groups that are fresh enough, first started first.

        The trainer publishes a new version between batches: only that makes room for new groups.
        `max_staleness + 1` batches can be taken in advance; one more waits until somebody else
        publishes, and for ever when nobody does.

        Raises:
            FailureBudgetError: too many episodes fail, or no group comes through at all.
            TrainError: the filters reject everything, or the journal's disk is full.
            UsageError: the environment cannot serve the request (no such split, ...).
            InfrastructureError: the runner was closed.
        """
        while True:
            self._changed.clear()
            if self._fatal is not None:
                raise self._fatal
            batch = None
            if self._suspects is None:
                batch = self._ledger.hand_out(self._engine.policy_version)
            self._admit()
            if batch is not None:
                return batch
            await self._changed.wait()

    def stats(self) -> RolloutStats:
        """A snapshot, for metrics and for a live display."""
        engine_s, env_s, agent_s = self.in_flight.integrals()
        version = self._engine.policy_version
        counts, ledger = self._counts, self._ledger
        return RolloutStats(
            policy_version=version,
            elapsed_s=time.perf_counter() - self._start_s,
            episodes_in_flight=self.in_flight.episodes,
            episodes_queued=len(self._jobs),
            waiting_on_engine=self.in_flight.engine,
            waiting_on_env=self.in_flight.env,
            waiting_on_agent=self.in_flight.agent,
            groups_running=len(self._drawing) + len(self._running),
            groups_ready=len(ledger.ready),
            oldest_ready_s=ledger.ready.oldest_s,
            room=ledger.room(version),
            num_groups_started=ledger.counts["started"],
            num_groups_accepted=ledger.counts["accepted"],
            num_groups=ledger.counts["handed_out"],
            num_groups_failed=ledger.counts["failed"],
            num_groups_stale=ledger.counts["stale"],
            num_groups_rejected=dict(ledger.rejected),
            num_groups_restored=ledger.counts["restored"],
            num_episodes=counts["episodes"],
            num_retries=counts["retries"],
            num_lost=counts["lost"],
            num_replayed_groups=counts["replayed_groups"],
            outage_s=self._outage.seconds,
            outage_patience_s=self._outage.patience_s,
            num_failures=dict(self._failures),
            num_tokens=counts["tokens"],
            engine_s=engine_s,
            env_s=env_s,
            agent_s=agent_s,
        )

    def state(self) -> dict[str, Any]:
        """What a resumed run needs so that no group is lost or trained twice; fit for JSON.

        Groups that were handed out count as trained once the version that was made of them is
        published.
        """
        return self._ledger.state([*self._drawing, *self._running], self._engine.policy_version)

    async def aclose(self) -> None:
        """Cancel what is in flight and wait until it has ended. Idempotent."""
        self._stop(InfrastructureError("the rollout runner was closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._lockstep is not None:
            await self._lockstep.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # ---- admission ----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Fill the free slots: siblings of groups that have started first, then new groups."""
        if self._admits_soon:
            return
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if self._outage.hold_s > 0 and self._fatal is None:
            self._admit_again_in(self._outage.hold_s)
            return
        if self._has_replays:
            self._sort_jobs()
        num_started = 0
        while len(self._tasks) < self.config.max_in_flight and self._fatal is None:
            if num_started == _AT_A_TIME:
                self._wake = asyncio.get_running_loop().call_soon(self._admit_on)
                self._admits_soon = True
                return
            num_started += 1
            if self._jobs:
                group, member, round = self._jobs.popleft()
                if round == group.round:
                    group.add(self._spawn(self._play_member(group, member)))
            elif self._ledger.room(self._engine.policy_version) == 0:
                self._admit_again_in(_POLL_S)
                return
            elif not self._start_group():
                return

    def _admit_on(self) -> None:
        self._admits_soon = False
        self._admit()

    def _admit_again_in(self, seconds: float) -> None:
        self._wake = asyncio.get_running_loop().call_later(seconds, self._admit)

    def _start_group(self) -> bool:
        """Start the next group; False where nothing can start before something has ended."""
        num_playing = len(self._tasks) - len(self._drawing)
        num_taken = num_playing + len(self._drawing) * self.config.group_size
        if num_taken >= self.config.max_in_flight:
            return False
        if self._lockstep is not None and self._drawing:
            return False  # whichever task came first would be sampled first
        try:
            issued = self._ledger.issue()
        except Exception as error:
            self._stop(error)
            return False
        if issued is None:
            return False
        self._drawing.add(issued[0])
        self._spawn(self._open_group(*issued))
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In a slot, which is free again when it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._slot_free)
        return task

    async def _open_group(self, index: int, options: Mapping[str, Any]) -> None:
        """Draw the task, which may take a while where it comes from afar."""
        task = await self._draw_task(index, options)
        self._drawing.discard(index)
        if task is None:
            self._lose_group(index)
            return
        self._enqueue(RunningGroup(index, task, self.config.group_size))

    def _enqueue(self, group: RunningGroup) -> None:
        """Queue all members of a group, for the first time or once more."""
        group.num_ended_before = self._num_came_through
        self._running[group.index] = group
        self._jobs.extend((group, member, group.round) for member in range(group.size))

    def _sort_jobs(self) -> None:
        """Groups that are played again go first, for they were started first."""
        self._has_replays = False
        current = [job for job in self._jobs if job[2] == job[0].round]
        self._jobs = deque(sorted(current, key=lambda job: (job[0].index, job[1])))

    async def _draw_task(self, index: int, options: Mapping[str, Any]) -> Task | None:
        """The task of group `index`; None when the environment fails to give one."""
        seed = derive_seed(self._seed, _TASK, index)
        options = {"split": self._split, **options}
        num_left = 1 + self.config.max_retries
        while num_left > 0:
            num_left -= 1
            env = self._envs.take()
            try:
                async with asyncio.timeout(self.config.episode_timeout_s):
                    await env.areset(seed=seed, options=options)
            except EpisodeError as error:
                if error.is_outage:
                    num_left += 1
                    self._outage.lost(str(error))
                    await asyncio.sleep(self._outage.pause_s)
                    continue
                self._record_failure(stop_reason_of(error), str(error))
            except TimeoutError:
                self._record_failure(StopReason.TIMEOUT, "the environment gave no task in time")
            else:
                self._envs.give_back(env)
                return env.task
            if pause_s := self._budget.pause_s:
                await asyncio.sleep(pause_s)
        return None

    # ---- episodes -----------------------------------------------------------------------------

    async def _play_member(self, group: RunningGroup, member: int) -> None:
        config, round = self.config, group.round
        for attempt in range(1 + config.max_retries):
            order = EpisodeRequest(
                task=group.task,
                seed=derive_seed(self._seed, _EPISODE, group.index, member, attempt),
                trajectory_id=group.trajectory_id(member, attempt),
                group_id=group.id,
            )
            trajectory = await self._player.play(order)
            if group.round != round:  # it is played again already
                return
            self._counts["episodes"] += 1
            self._counts["retries"] += attempt > 0 or round > 0
            self._counts["tokens"] += trajectory.num_policy_tokens
            if self._on_trajectory is not None:
                self._on_trajectory(trajectory)
            if not trajectory.stop_reason.is_failure:
                group.members.append((member, trajectory))
                self._budget.record(trajectory.stop_reason)
                self._outage.came_through()
                self._num_came_through += 1
                break
            self._count_failure(trajectory)
            if trajectory.stop_reason is StopReason.REWARD_ERROR:
                # Neither another try nor the siblings alone: both would select by reward.
                group.is_void = True
                break
            is_lost = trajectory.is_lost
            if is_infrastructure_failure(trajectory) and self._may_replay(group, is_lost=is_lost):
                self._on_outage(group, is_lost=is_lost)
                return
            if pause_s := self._budget.pause_s:
                await asyncio.sleep(pause_s)
        group.num_open -= 1
        if group.num_open == 0:
            self._finish_group(group)

    def _finish_group(self, running: RunningGroup) -> None:
        index = running.index
        del self._running[index]
        if self._suspects is not None and index in self._suspects.at_risk:
            self._suspects = None  # it came through: only a part was lost
        if running.is_void or len(running.members) < self.config.min_group_size:
            self._lose_group(index)
            return
        running.members.sort(key=itemgetter(0))
        members = tuple(trajectory for _, trajectory in running.members)
        num_failed = self.config.group_size - len(members)
        group = Group(id=running.id, task=running.task, trajectories=members, num_failed=num_failed)
        self._num_failed_in_a_row = 0
        self._ledger.complete(index, group)

    def _slot_free(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)
        self._admit()
        self._changed.set()

    # ---- what goes wrong ----------------------------------------------------------------------

    def _count_failure(self, trajectory: Trajectory) -> None:
        """Count a failed episode, by its kind.

        Raises:
            FailureBudgetError: there were too many, or the outage takes too long.
        """
        reason, error = trajectory.stop_reason, trajectory.error
        # Workers that die before anything has worked are no outage: the episodes kill them.
        is_broken = reason is StopReason.WORKER_ERROR and self._num_came_through == 0
        if not trajectory.is_lost or is_broken:
            self._record_failure(reason, error)
            return
        self._counts["lost"] += 1
        self._failures[str(reason)] += 1
        self._outage.lost(error)

    def _may_replay(self, group: RunningGroup, *, is_lost: bool) -> bool:
        """Whether the whole group is played again; not for ever, if it is lost and others not."""
        has_worked = self._num_came_through > 0 or is_lost
        if group.num_ended_before != self._num_came_through or not has_worked:
            group.num_replays += 1
        return group.num_replays <= _MAX_REPLAYS

    def _on_outage(self, group: RunningGroup, *, is_lost: bool) -> None:
        """Play the group again, and whatever an outage has favoured (see `outages`)."""
        if self._suspects is not None:
            self._suspects.hit(group.index)
        elif is_lost:
            in_flight = [index for index, it in self._running.items() if it.has_begun]
            self._suspects = Suspects.of(group.index, in_flight)
        self._replay(group)
        self._outage.hold(self._outage.pause_s if is_lost else self._budget.pause_s)
        self._settle_suspects()

    def _replay(self, group: RunningGroup) -> None:
        group.begin_again()
        self._has_replays = True
        self._counts["replayed_groups"] += 1
        self._enqueue(group)

    def _settle_suspects(self) -> None:
        """Where all that was in flight is lost, complete groups are played again as well."""
        if self._suspects is None or not self._suspects.are_all_hit:
            return
        since, self._suspects = self._suspects.since, None
        for index, group in self._ledger.take_back(since).items():
            self._replay(RunningGroup(index, group.task, self.config.group_size))

    def _record_failure(self, reason: StopReason, error: str | None) -> None:
        self._failures[str(reason)] += 1
        self._budget.record(reason, error)

    def _lose_group(self, index: int) -> None:
        self._ledger.fail(index)
        if self._suspects is not None:
            self._suspects.at_risk.discard(index)
            self._settle_suspects()
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row < max(8, 2 * self.config.batch_groups):
            return
        if self._budget.is_outage:  # which has its own patience
            return
        raise FailureBudgetError(
            f"{self._num_failed_in_a_row} groups in a row came through with fewer than "
            f"min_group_size = {self.config.min_group_size} members; {self._budget.describe()}",
            hints=self._budget.hints(),
        )

    def _stop(self, error: BaseException) -> None:
        """Let the trainer see `error`; nothing new starts."""
        if self._fatal is None:
            self._fatal = error
        self._jobs.clear()
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        self._changed.set()


def _lockstep(engine: Engine, num_playing: Callable[[], int]) -> Lockstep:
    if not isinstance(engine, TogetherEngine):
        raise ConfigError(
            f"deterministic rollouts need an engine whose batches can be decided, and "
            f"{type(engine).__name__} has batches of its own",
            hints=["engine.id=embedded can", "deterministic=false"],
        )
    return Lockstep(engine, num_playing)
