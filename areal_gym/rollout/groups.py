"""Tracks the state of each group of a training run.

    issued -> running -> ready -> handed out -> trained
      |         |  ^       |  |
      |         |  +-------+  +--> dropped, "stale": too old to be trained on
      |         +-- an outage      (checked when a batch is handed out)
      |         +----------------> dropped, by a filter: "zero-variance/all-equal", ...
      +---------+----------------> dropped, "failed": no task, or too few members completed

    issued       has a number and reset options; its task is being drawn
    running      its members are being played; failed members are retried one by one
    ready        is complete, was accepted by the filters, and waits for the trainer
    handed out   is in a batch; it is trained once the version made from the batch is published

While the engine serves `version`, this many groups may start (docs/asynchrony.md):

    (max_staleness + version + 1) * batch_groups - (groups handed out so far + ready + running)

A group that an outage hits is played again as a whole, with the same seeds: keeping the members
that had completed would favour short episodes. If the outage ended every episode in flight, ready
groups that had started after the first lost group are played again as well. Whether a group is kept
then depends on when it started, not on how long it took.

The journal, if there is one, records each change before it takes effect.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from areal_gym.config import RolloutConfig
from areal_gym.episode_roles import has_policy_tokens
from areal_gym.errors import MasteredError, TrainError
from areal_gym.rollout.filters import GroupFilter, rejection
from areal_gym.rollout.journal import Journal
from areal_gym.rollout.task_scheduler import TaskScheduler
from areal_gym.types import Group, Task, Trajectory

_MIN_REJECTED, _MIN_BATCHES = 64, 8
"""The run stops after this many rejected groups in a row: the larger of a number of groups, and a
number of batches' worth of groups. If one group in twenty is kept, 64 rejections in a row happen by
chance in 4 of 100 cases, and 128 in one of 700."""
_NO_TOKENS = "policy/no-token"
"""The reason for which a group is rejected in which the policy sampled nothing."""
_SOLVED = 1 - 1e-9
"""The least reward of a task that is solved."""
_MAX_REPLAYS = 4
"""How often infrastructure failures replay a whole group while other episodes complete. After that,
the group itself is the likely cause, and its members fail one by one."""


@dataclass(eq=False, slots=True)
class RunningGroup:
    """A group that is being played."""

    index: int
    task: Task
    """The task that all members play."""
    size: int
    num_open: int = 0
    """Members that are being played or wait for a slot."""
    members: list[tuple[int, Trajectory]] = field(default_factory=list)
    """Members that completed, by number."""
    is_void: bool = False
    """Whether the group must not be trained on, because a reward was not a finite number."""
    round: int = 0
    """How often the whole group was played again; results of earlier rounds do not count."""
    num_replays: int = 0
    """How often it was played again while other episodes completed."""
    num_completed_before: int = 0
    """Episodes of the run that had completed when this round started."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """The asyncio tasks of members that are being played."""

    def __post_init__(self) -> None:
        self.num_open = self.size

    @property
    def id(self) -> str:
        """The group's id in files."""
        return f"g{self.index:06d}"

    @property
    def has_begun(self) -> bool:
        """Whether any member is being played or has ended."""
        return bool(self.tasks) or self.num_open < self.size

    def trajectory_id(self, member: int, attempt: int) -> str:
        """Return the id of one attempt of a member; every attempt has its own."""
        replay = f"-replay{self.round}" if self.round else ""
        retry = f"-retry{attempt}" if attempt else ""
        return f"{self.id}-{member}{replay}{retry}"

    def may_replay(self, num_completed: int, *, is_lost: bool) -> bool:
        """Return whether an infrastructure failure may replay the whole group.

        A group that keeps failing while others complete is not replayed for ever.

        Args:
            num_completed: episodes of the run that have completed.
            is_lost: whether an outage ended the member.
        """
        has_worked = num_completed > 0 or is_lost
        if self.num_completed_before != num_completed or not has_worked:
            self.num_replays += 1
        return self.num_replays <= _MAX_REPLAYS

    def begin_again(self) -> None:
        """Start a new round: forget completed members, and cancel those that are being played."""
        self.round += 1
        self.is_void = False
        self.num_open = self.size
        self.members.clear()
        for task in self.tasks - {asyncio.current_task()}:
            task.cancel()
        self.tasks = set()

    def complete(self) -> Group:
        """Return the finished group, made of the members that completed."""
        self.members.sort(key=itemgetter(0))
        members = tuple(trajectory for _, trajectory in self.members)
        num_failed = self.size - len(members)
        return Group(id=self.id, task=self.task, trajectories=members, num_failed=num_failed)


class _ReadyGroup(NamedTuple):
    group: Group
    oldest_version: int | None
    """Computed once, because batches are requested at the end of every episode."""
    since_s: float


@dataclass(slots=True)
class _OutageExtent:
    """Tells whether an outage lost every group in flight, or only some of them."""

    since: int
    """The first group that was hit; ready groups with higher numbers may have been favoured."""
    at_risk: set[int]
    """Groups that were in flight at the beginning and may still be hit."""


class GroupTracker:
    """Tracks the state of all groups; the runner plays their episodes.

    Args:
        config: group and batch sizes, and the limit on staleness.
        tasks: decides which task each group plays.
        version: the policy version that the engine serves, which is the number of trained batches.
        filters: reject complete groups, by name.
        journal: records each change; the groups that it holds from an interrupted run are restored.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tasks: TaskScheduler,
        version: int,
        filters: Mapping[str, GroupFilter],
        journal: Journal | None,
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._filters = filters
        self._journal = journal
        self.issued: set[int] = set()
        self.running: dict[int, RunningGroup] = {}
        self._ready: dict[int, _ReadyGroup] = {}
        self._handed_out: deque[tuple[int, list[int]]] = deque()
        """Batches that may still be untrained: the step that each is for, and its groups."""
        self._num_batches = version
        """Batches handed out, including those before an interruption."""
        self.counts: Counter[str] = Counter()
        """Groups by the states that they have reached."""
        self.rejected: Counter[str] = Counter()
        """Groups that filters rejected, by "filter/reason"."""
        self._rejected_in_a_row: Counter[str] = Counter()
        self._num_solved_in_a_row = 0
        """Groups among them whose members all earned a reward of 1 or more."""
        self._outage: _OutageExtent | None = None
        """No batch is handed out while the extent of an outage is unknown."""
        if journal is not None:
            self._restore(journal)

    @property
    def num_ready(self) -> int:
        """The number of groups that wait for the trainer."""
        return len(self._ready)

    @property
    def oldest_ready_s(self) -> float:
        """Seconds that the first started of them has waited; 0 if there is none."""
        if not self._ready:
            return 0.0
        return time.monotonic() - self._ready[min(self._ready)].since_s

    def room(self, version: int) -> int:
        """Return how many groups may still start while the engine serves `version`."""
        limit = (self._config.max_staleness + version + 1) * self._config.batch_groups
        num_committed = self._num_batches * self._config.batch_groups + len(self._ready)
        return max(0, limit - num_committed - len(self.issued) - len(self.running))

    # ---- issued -> running -> ready -----------------------------------------------------------

    def issue(self) -> tuple[int, Mapping[str, Any]] | None:
        """Issue a group: return its number and reset options; None if a curriculum must wait."""
        issued = self._tasks.next()
        if issued is not None:
            if self._journal is not None:
                self._journal.issued(*issued)
            self.issued.add(issued[0])
            self.counts["started"] += 1
        return issued

    def start(self, index: int, task: Task) -> RunningGroup:
        """Start an issued group whose task has been drawn."""
        self.issued.discard(index)
        group = RunningGroup(index, task, self._config.group_size)
        self.running[index] = group
        return group

    def finish(self, running: RunningGroup) -> None:
        """Finish a group with enough members; the filters decide whether it is trained on.

        One in which the policy sampled no token is rejected whatever they say.

        Raises:
            MasteredError: too many groups in a row were rejected, most of them solved.
            TrainError: too many others were rejected, or the disk is full.
        """
        index = running.index
        self._survived_outage(index)
        group = running.complete()
        self._tasks.finished(index, group.rewards_G)
        # Fixed roles ended its episodes before the policy's turn, or its prompts fill the context.
        is_empty = not has_policy_tokens(group)
        if reason := _NO_TOKENS if is_empty else rejection(self._filters, group):
            del self.running[index]
            self._reject(index, group, reason)
            return
        if self._journal is not None:
            self._journal.scored(index, group)
        del self.running[index]  # not before the journal has it: a full disk must not lose it
        self._ready[index] = _ReadyGroup(group, group.oldest_version, time.monotonic())
        self.counts["accepted"] += 1
        self._rejected_in_a_row.clear()
        self._num_solved_in_a_row = 0

    def fail(self, index: int) -> None:
        """Drop a group that has no task or too few members."""
        self._survived_outage(index)
        self._tasks.finished(index, None)
        self._drop(index, "failed")
        self.issued.discard(index)
        self.running.pop(index, None)
        self.counts["failed"] += 1

    # ---- ready -> handed out -> trained -------------------------------------------------------

    def hand_out(self, version: int) -> list[Group] | None:
        """Return the next batch under `version`, or None if too few groups are ready.

        Groups are taken in the order in which they were *started*. In the order in which they
        finish, slow groups would always come last and be dropped as stale, so the policy would
        train on quick episodes only. Start order also makes batches reproducible.
        """
        if self._outage is not None:
            return None
        self._settle(version)
        for index, ready in list(self._ready.items()):
            if not is_fresh(ready.oldest_version, version, self._config.max_staleness):
                del self._ready[index]
                self._drop(index, "stale", ready.group)
                self.counts["stale"] += 1
        if len(self._ready) < self._config.batch_groups:
            return None
        batch = sorted(self._ready)[: self._config.batch_groups]
        self._num_batches += 1
        if self._journal is not None:
            self._journal.taken(batch, self._num_batches)
        self._handed_out.append((self._num_batches, batch))
        self.counts["handed_out"] += len(batch)
        return [self._ready.pop(index).group for index in batch]

    def state(self, version: int) -> dict[str, Any]:
        """Return which groups are settled (trained or dropped), as JSON values.

        A batch is trained once the version made from it is published.
        """
        self._settle(version)
        untrained = [index for _, indices in self._handed_out for index in indices]
        return self._tasks.state([*untrained, *self._ready, *self.issued, *self.running])

    # ---- outages: running or ready -> running -------------------------------------------------

    def interrupt(self, group: RunningGroup, *, is_lost: bool) -> list[RunningGroup]:
        """Begin a group again, one of whose members failed or was lost to an outage (`is_lost`).

        Returns the groups to play again as a whole: this one, and those that the outage favoured.
        """
        index = group.index
        if self._outage is not None:
            self._outage.since = min(self._outage.since, index)
            self._outage.at_risk.discard(index)
        elif is_lost:
            in_flight = {other for other, running in self.running.items() if running.has_begun}
            self._outage = _OutageExtent(since=index, at_risk=in_flight - {index})
        group.begin_again()
        if self._outage is None or self._outage.at_risk:
            return [group]
        since, self._outage = self._outage.since, None
        return [group, *self._take_back(since)]

    def _survived_outage(self, index: int) -> None:
        if self._outage is not None and index in self._outage.at_risk:
            self._outage = None  # only some of the groups in flight were lost

    def _take_back(self, since: int) -> list[RunningGroup]:
        taken_back = []
        for index in sorted(index for index in self._ready if index > since):
            if self._journal is not None:
                self._journal.issued(index, self._tasks.options_of(index))
            group = self.start(index, self._ready.pop(index).group.task)
            group.begin_again()
            taken_back.append(group)
            self.counts["accepted"] -= 1
        return taken_back

    # ---- inside -------------------------------------------------------------------------------

    def _restore(self, journal: Journal) -> None:
        known = journal.take_known()
        end = max(known, default=-1) + 1
        unsettled = self._tasks.unsettled(end)
        entries = {index: known[index] for index in unsettled if index in known}
        ended = {index: entry for index, entry in entries.items() if entry.group or entry.dropped}
        options = {index: entry.options for index, entry in entries.items()}
        self._tasks.resume(options, [index for index in unsettled if index not in ended], end)
        for index, entry in ended.items():
            self._tasks.finished(index, entry.rewards_G)
            if (group := entry.group) is not None:
                self._ready[index] = _ReadyGroup(group, group.oldest_version, time.monotonic())
                self.counts["restored"] += 1

    def _settle(self, version: int) -> None:
        while self._handed_out and self._handed_out[0][0] <= version:
            for index in self._handed_out.popleft()[1]:
                self._tasks.forget(index)

    def _reject(self, index: int, group: Group, reason: str) -> None:
        self._drop(index, reason, group)
        self.rejected[reason] += 1
        self._rejected_in_a_row[reason] += 1
        self._num_solved_in_a_row += min(group.rewards_G) >= _SOLVED
        num_rejected = self._rejected_in_a_row.total()
        if num_rejected >= max(_MIN_REJECTED, _MIN_BATCHES * self._config.batch_groups):
            counts = self._rejected_in_a_row.most_common()
            reasons = ", ".join(f"{count} by {reason}" for reason, count in counts)
            if self._rejected_in_a_row[_NO_TOKENS] > num_rejected / 2:
                raise TrainError(
                    f"{num_rejected} groups in a row are rejected, most of them because the "
                    f"policy sampled no token in them: {reasons}",
                    hints=[
                        "prompts that fill the context: raise engine.max_context",
                        "fixed roles that end the episodes before the policy's turn: "
                        "env.fixed_roles, or other tasks",
                    ],
                )
            is_mastered = self._num_solved_in_a_row > num_rejected / 2
            error = MasteredError if is_mastered else TrainError
            raise error(
                f"the filters rejected {num_rejected} groups in a row, and nothing is left to "
                f"train on: {reasons}; all members solved {self._num_solved_in_a_row} of them",
                hints=[
                    "look at what the policy does: trajectories/eval-*.jsonl of the run directory",
                    "give it tasks that it solves sometimes: another level or data set, or "
                    "rollout.curriculum=success-rate",
                    "or train without the filter: rollout.filters=[]",
                ],
            )

    def _drop(self, index: int, reason: str, group: Group | None = None) -> None:
        self._tasks.forget(index)
        if self._journal is not None:
            self._journal.dropped(index, reason, None if group is None else group.rewards_G)


def is_fresh(oldest: int | None, version: int, max_staleness: int) -> bool:
    """Return whether a group may be trained on whose oldest token was sampled by `oldest`."""
    return oldest is None or version - oldest <= max_staleness
