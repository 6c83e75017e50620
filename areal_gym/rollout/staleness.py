"""How far sampling may run ahead of training.

    may start:   (max_staleness + version + 1) * batch_groups - (accepted + running)   groups

A group that starts under this rule would be trained on at most `max_staleness` versions later, if
groups finished in the order in which they started. They do not, so each group is checked again,
token by token, at the door of the trainer. (The other limit on what may start, the number of
episodes in flight, is the runner's: counted in episodes, stragglers do not hold their siblings'
slots.)
"""

from __future__ import annotations

from dataclasses import dataclass


def is_fresh(oldest: int | None, version: int, max_staleness: int) -> bool:
    """Whether a group may be trained on whose oldest token `oldest` sampled; None: it has none."""
    return oldest is None or version - oldest <= max_staleness


@dataclass(slots=True)
class AdmissionControl:
    """Accounts for groups: running, then accepted or not.

    Example: `AdmissionControl(batch_groups=16, max_staleness=0)` starts 16 groups per version.
    """

    batch_groups: int
    max_staleness: int
    num_accepted: int = 0
    """Groups that were or will be trained on. A run that starts at version v (resumed) has had
    `v * batch_groups` of them."""
    num_running: int = 0

    def capacity(self, version: int) -> int:
        """How many more groups may start while `version` samples; not negative."""
        limit = (self.max_staleness + version + 1) * self.batch_groups
        return max(0, limit - (self.num_accepted + self.num_running))

    def start(self) -> None:
        """A group starts."""
        self.num_running += 1

    def accept(self) -> None:
        """A running group is complete."""
        self.num_running -= 1
        self.num_accepted += 1

    def reject(self) -> None:
        """A running group failed: another may start in its place."""
        self.num_running -= 1

    def drop(self) -> None:
        """An accepted group turned out too old: another may start in its place."""
        self.num_accepted -= 1

    def take_back(self) -> None:
        """An accepted group is played again."""
        self.num_accepted -= 1
        self.num_running += 1

    def restore(self) -> None:
        """A group that was accepted before an interruption is there again."""
        self.num_accepted += 1
