"""What becomes of every group, from its number to the batch that it is trained in.

    issue -> [being played] -> failed                      dropped: too few members came through
                          \\-> complete -> rejected         dropped: a filter says so
                                      \\-> ready -> stale   dropped: too old
                                               \\-> handed out -> trained

A dropped group makes room for another one. The journal, when there is one, is told of each change
before anybody acts on it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from areal_gym.config import RolloutConfig
from areal_gym.errors import TrainError
from areal_gym.rollout.buffer import GroupBuffer
from areal_gym.rollout.filters import GroupFilter, rejection
from areal_gym.rollout.journal import Journal
from areal_gym.rollout.staleness import AdmissionControl
from areal_gym.rollout.task_scheduler import TaskScheduler
from areal_gym.types import Group

_MIN_REJECTED, _MIN_BATCHES = 64, 8
"""Groups, and batches' worth of them, that filters may reject in a row. When one group in twenty is
kept, 64 rejections in a row happen by chance in 4 of 100 cases, 128 in one of 700."""


class GroupTracker:
    """Keeps account of groups; knows nothing of episodes.

    Args:
        config: sizes and limits.
        issuer: whose turn it is.
        version: what the engine serves. `version` batches were trained on.
        filters: by name.
        journal: that of an interrupted run is taken over.
    """

    def __init__(
        self,
        config: RolloutConfig,
        issuer: TaskScheduler,
        version: int,
        filters: Mapping[str, GroupFilter],
        journal: Journal | None,
    ) -> None:
        self._config = config
        self._issuer = issuer
        self._filters = filters
        self._journal = journal
        self._admission = AdmissionControl(
            config.batch_groups, config.max_staleness, num_accepted=version * config.batch_groups
        )
        self.ready = GroupBuffer()
        """Complete groups that wait for the trainer."""
        self.counts: Counter[str] = Counter()
        """Groups by what became of them."""
        self.rejected: Counter[str] = Counter()
        """Groups that filters rejected, by "filter/reason"."""
        self._rejected_in_a_row: Counter[str] = Counter()
        self._step = version
        self._handed_out: deque[tuple[int, list[int]]] = deque()
        """Batches that may not have been trained on yet: for which step, and their groups."""
        if journal is not None:
            self._take_over(journal)

    def room(self, version: int) -> int:
        """How many groups may still start while the engine serves `version`."""
        return self._admission.capacity(version)

    def issue(self) -> tuple[int, Mapping[str, Any]] | None:
        """Start a group: its number and its reset options. None: a curriculum has to wait."""
        issued = self._issuer.next()
        if issued is not None:
            if self._journal is not None:
                self._journal.issued(*issued)
            self._admission.start()
            self.counts["started"] += 1
        return issued

    def fail(self, index: int) -> None:
        """Too few members came through."""
        self._issuer.finished(index, None)
        self._drop(index, "failed")
        self._admission.reject()
        self.counts["failed"] += 1

    def complete(self, index: int, group: Group) -> None:
        """A group is finished; the filters judge it.

        Raises:
            TrainError: they have rejected too many in a row, or the journal's disk is full.
        """
        self._issuer.finished(index, group.rewards_G)
        reason = rejection(self._filters, group)
        if reason is not None:
            self._reject(index, group, reason)
            return
        if self._journal is not None:
            self._journal.scored(index, group)
        self.ready.put(index, group)
        self._admission.accept()
        self.counts["accepted"] += 1
        self._rejected_in_a_row.clear()

    def take_back(self, since: int) -> dict[int, Group]:
        """Remove and return complete groups that were started after `since`, to play them again."""
        groups = self.ready.take_after(since)
        for index in groups:
            if self._journal is not None:
                self._journal.issued(index, self._issuer.options_of(index))
            self._admission.take_back()
            self.counts["accepted"] -= 1
        return groups

    def hand_out(self, version: int) -> list[Group] | None:
        """The next batch under `version`, first started first; None while there is not enough."""
        self._settle(version)
        for index, group in self.ready.drop_stale(version, self._config.max_staleness).items():
            self._drop(index, "stale", group)
            self._admission.drop()
            self.counts["stale"] += 1
        if len(self.ready) < self._config.batch_groups:
            return None
        batch = self.ready.take(self._config.batch_groups)
        self._step += 1
        if self._journal is not None:
            self._journal.taken(batch, self._step)
        self._handed_out.append((self._step, list(batch)))
        self.counts["handed_out"] += len(batch)
        return list(batch.values())

    def state(self, running: Iterable[int], version: int) -> dict[str, Any]:
        """What is done with and what is not, fit for JSON.

        A batch is done with when the version that was made of it is published.
        """
        self._settle(version)
        untrained = (index for _, indices in self._handed_out for index in indices)
        return self._issuer.state([*untrained, *self.ready.indices, *running])

    # ---- inside -------------------------------------------------------------------------------

    def _take_over(self, journal: Journal) -> None:
        known = journal.take_known()
        end = max(known, default=-1) + 1
        unsettled = self._issuer.unsettled(end)
        told = {index: known[index] for index in unsettled if index in known}
        over = {index: it for index, it in told.items() if it.group is not None or it.dropped}
        options = {index: it.options for index, it in told.items()}
        self._issuer.resume(options, [index for index in unsettled if index not in over], end)
        for index, it in over.items():
            self._issuer.finished(index, it.rewards_G)
            if it.group is not None:
                self.ready.put(index, it.group)
                self._admission.restore()
                self.counts["restored"] += 1

    def _settle(self, version: int) -> None:
        while self._handed_out and self._handed_out[0][0] <= version:
            for index in self._handed_out.popleft()[1]:
                self._issuer.forget(index)

    def _reject(self, index: int, group: Group, reason: str) -> None:
        self._drop(index, reason, group)
        self._admission.reject()
        self.rejected[reason] += 1
        self._rejected_in_a_row[reason] += 1
        num_rejected = self._rejected_in_a_row.total()
        if num_rejected >= max(_MIN_REJECTED, _MIN_BATCHES * self._config.batch_groups):
            each = ", ".join(f"{n} by {why}" for why, n in self._rejected_in_a_row.most_common())
            raise TrainError(
                f"the filters rejected {num_rejected} groups in a row, and nothing is left to "
                f"train on: {each}",
                hints=[
                    "look at what the policy does: trajectories/eval-*.jsonl of the run directory",
                    "give it tasks that it solves sometimes: another level or data set, or "
                    "rollout.curriculum=success-rate",
                    "or train without the filter: rollout.filters=[]",
                ],
            )

    def _drop(self, index: int, reason: str, group: Group | None = None) -> None:
        self._issuer.forget(index)
        if self._journal is not None:
            self._journal.dropped(index, reason, None if group is None else group.rewards_G)
