"""Many episodes at once, delivered to the trainer as batches of groups.

    tasks -> [admit] -> episodes in flight -> [group complete] -> buffer -> [fresh?] -> batch
               ^        a slot waits for                                       |          |
               |        engine, env or agent                 too old: dropped, counted    v
               |                                                                       trainer
               +------------ version + 1, published to the engine -------------------------+

    admit     waits for  a free slot, and room under the staleness limit (`Admission`)
              unblocked  by an episode that ends, by a new version
    batch     waits for  `batch_groups` complete groups
              unblocked  by a group that completes

There is one code path. With `max_staleness = 0` exactly one batch of groups is started per version,
and taken in the order in which it was started: the synchronous algorithm.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Self

from areal_gym.agents.base import Agent
from areal_gym.config import RolloutConfig
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.envs.base import TextEnv
from areal_gym.errors import EpisodeError, FailureBudgetError, InfrastructureError
from areal_gym.rendering import Renderer
from areal_gym.rollout.buffer import GroupBuffer
from areal_gym.rollout.episode import InFlight, derive_seed, play_episode, stop_reason_of
from areal_gym.rollout.failures import FailureBudget
from areal_gym.rollout.pool import EnvPool
from areal_gym.rollout.staleness import Admission
from areal_gym.types import Group, Task, Trajectory

__all__ = ["RolloutRunner", "RolloutStats"]

_TASK, _EPISODE = 0, 1
"""Streams of seeds."""
_POLL_S = 0.02
"""Engines do not announce a new version; while only that can unblock us, we look this often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStats:
    """Where the runner stands. Counts are since its start."""

    policy_version: int
    episodes_in_flight: int
    waiting_on_engine: int
    waiting_on_env: int
    waiting_on_agent: int
    groups_running: int
    groups_ready: int
    """Complete groups that wait for the trainer."""
    num_groups: int
    """Groups handed to the trainer."""
    num_groups_failed: int
    """Dropped: fewer than `min_group_size` members came through."""
    num_groups_stale: int
    """Dropped at the trainer's door: too old."""
    num_episodes: int
    """Episodes played to an end, failures and retries included."""
    num_retries: int
    num_failures: Mapping[str, int]
    """Failed episodes by stop reason."""


@dataclass(slots=True)
class _RunningGroup:
    index: int
    task: Task
    num_open: int
    """Members that still play."""
    members: list[tuple[int, Trajectory]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"g{self.index:06d}"


class RolloutRunner:
    """The trainer's source of batches. Use it as an asynchronous context manager.

    Task k of seed s is always the same task. Siblings share the task; their seeds differ.
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
        on_trajectory: Callable[[Trajectory], None] | None = None,
        state: Mapping[str, Any] | None = None,
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
            on_trajectory: sees every episode that ends, failures included. What it raises stops
                the runner.
            state: what `state()` of the interrupted run gave. Without it, a run that starts at
                version v goes on after the tasks of v whole batches.
        """
        self.config = config
        self.in_flight = InFlight()
        self._agent = agent
        self._engine = engine
        self._renderer = renderer
        self._envs = EnvPool(env_factory)
        self._seed = seed
        self._split = split
        self._env_id = env_id
        self._agent_id = agent_id
        self._on_trajectory = on_trajectory
        self._params = SamplingParams(
            max_new_tokens=config.max_new_tokens, temperature=config.temperature
        )
        self._admission = Admission(
            config.batch_groups,
            config.max_staleness,
            num_accepted=engine.policy_version * config.batch_groups,
        )
        self._buffer = GroupBuffer()
        self._budget = FailureBudget(config.max_failure_rate)
        self._next_group: int = (state or {}).get("next_group", self._admission.num_accepted)
        self._again: deque[int] = deque((state or {}).get("unfinished", ()))
        self._running: dict[int, _RunningGroup] = {}
        self._jobs: deque[tuple[_RunningGroup, int]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._poll: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._fatal: BaseException | None = None
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._num_lost_in_a_row = 0

    # ---- the trainer's side -------------------------------------------------------------------

    async def next_batch(self) -> list[Group]:
        """The next `batch_groups` complete groups that are fresh enough, first started first.

        Raises:
            FailureBudgetError: too many episodes fail, or no group comes through at all.
            UsageError: the environment cannot serve the request (no such split, ...).
            InfrastructureError: the runner was closed.
        """
        while True:
            self._drop_stale()
            self._admit()
            if self._fatal is not None:
                raise self._fatal
            if len(self._buffer) >= self.config.batch_groups:
                self._counts["groups"] += self.config.batch_groups
                return self._buffer.take(self.config.batch_groups)
            self._changed.clear()
            await self._changed.wait()

    def stats(self) -> RolloutStats:
        """A snapshot, for a live display."""
        return RolloutStats(
            policy_version=self._engine.policy_version,
            episodes_in_flight=self.in_flight.episodes,
            waiting_on_engine=self.in_flight.engine,
            waiting_on_env=self.in_flight.env,
            waiting_on_agent=self.in_flight.agent,
            groups_running=len(self._running),
            groups_ready=len(self._buffer),
            num_groups=self._counts["groups"],
            num_groups_failed=self._counts["groups_failed"],
            num_groups_stale=self._counts["groups_stale"],
            num_episodes=self._counts["episodes"],
            num_retries=self._counts["retries"],
            num_failures=dict(self._failures),
        )

    def state(self) -> dict[str, Any]:
        """What a resumed run needs so that no task is lost or played twice; fit for JSON."""
        unfinished = {*self._running, *self._buffer.indices, *self._again}
        return {"next_group": self._next_group, "unfinished": sorted(unfinished)}

    async def aclose(self) -> None:
        """Cancel what is in flight and wait until it has ended. Idempotent."""
        self._stop(InfrastructureError("the rollout runner was closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # ---- admission ----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Fill the free slots: siblings of groups that have started first, then new groups."""
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None
        while len(self._tasks) < self.config.max_in_flight and self._fatal is None:
            if self._jobs:
                group, member = self._jobs.popleft()
                task = asyncio.create_task(self._play_member(group, member))
                self._tasks.add(task)
                task.add_done_callback(self._member_done)
            elif self._admission.capacity(self._engine.policy_version) > 0:
                self._start_group()
            else:
                self._poll = asyncio.get_running_loop().call_later(_POLL_S, self._admit)
                return

    def _start_group(self) -> None:
        if self._again:
            index = self._again.popleft()
        else:
            index = self._next_group
            self._next_group += 1
        self._admission.start()
        try:
            task = self._draw_task(index)
        except Exception as error:
            self._stop(error)
            return
        if task is None:
            self._lose_group()
            return
        group = _RunningGroup(index, task, num_open=self.config.group_size)
        self._running[index] = group
        self._jobs.extend((group, member) for member in range(self.config.group_size))

    def _draw_task(self, index: int) -> Task | None:
        """The task of group `index`; None when the environment fails to give one."""
        for _ in range(1 + self.config.max_retries):
            env = self._envs.take()
            try:
                env.reset(
                    seed=derive_seed(self._seed, _TASK, index), options={"split": self._split}
                )
            except EpisodeError as error:
                reason = stop_reason_of(error)
                self._failures[str(reason)] += 1
                self._budget.record(reason, str(error))
            else:
                self._envs.give_back(env)
                return env.task
        return None

    # ---- episodes -----------------------------------------------------------------------------

    async def _play_member(self, group: _RunningGroup, member: int) -> None:
        config = self.config
        for attempt in range(1 + config.max_retries):
            env = self._envs.take()
            trajectory = await play_episode(
                env,
                self._agent,
                self._engine,
                self._renderer,
                options={"task": group.task},
                seed=derive_seed(self._seed, _EPISODE, group.index, member, attempt),
                params=self._params,
                trajectory_id=f"{group.id}-{member}" + (f"-retry{attempt}" if attempt else ""),
                group_id=group.id,
                env_id=self._env_id,
                agent_id=self._agent_id,
                timeout_s=config.episode_timeout_s,
                in_flight=self.in_flight,
            )
            self._counts["episodes"] += 1
            self._counts["retries"] += attempt > 0
            if self._on_trajectory is not None:
                self._on_trajectory(trajectory)
            if not trajectory.stop_reason.is_failure:
                self._envs.give_back(env)
                group.members.append((member, trajectory))
                self._budget.record(trajectory.stop_reason)
                break
            self._failures[str(trajectory.stop_reason)] += 1
            self._budget.record(trajectory.stop_reason, trajectory.error)
        group.num_open -= 1
        if group.num_open == 0:
            self._finish_group(group)

    def _finish_group(self, group: _RunningGroup) -> None:
        del self._running[group.index]
        if len(group.members) < self.config.min_group_size:
            self._lose_group()
            return
        group.members.sort(key=itemgetter(0))
        members = tuple(trajectory for _, trajectory in group.members)
        num_failed = self.config.group_size - len(members)
        self._buffer.put(
            group.index,
            Group(id=group.id, task=group.task, trajectories=members, num_failed=num_failed),
        )
        self._admission.accept()
        self._num_lost_in_a_row = 0

    def _member_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)
        self._admit()
        self._changed.set()

    # ---- what goes wrong ----------------------------------------------------------------------

    def _drop_stale(self) -> None:
        version, max_staleness = self._engine.policy_version, self.config.max_staleness
        for _ in self._buffer.drop_stale(version, max_staleness):
            self._admission.drop()
            self._counts["groups_stale"] += 1

    def _lose_group(self) -> None:
        self._admission.reject()
        self._counts["groups_failed"] += 1
        self._num_lost_in_a_row += 1
        if self._num_lost_in_a_row >= max(8, 2 * self.config.batch_groups):
            self._stop(
                FailureBudgetError(
                    f"{self._num_lost_in_a_row} groups in a row came through with fewer than "
                    f"min_group_size = {self.config.min_group_size} members; "
                    + self._budget.describe(),
                    hints=self._budget.hints(),
                )
            )

    def _stop(self, error: BaseException) -> None:
        """Let the trainer see `error`; nothing new starts."""
        if self._fatal is None:
            self._fatal = error
        self._jobs.clear()
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None
        self._changed.set()
