"""Several processes that train one policy together, as one of them sees the others.

Every rank is given the whole batch and does its share of the forward and backward passes. What is
said here is small: metrics, and numbers per token that are known before the first update. Weights
and gradients are the business of `areal_gym.trainer.parallel.fsdp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `size`; by default it is alone.

    With more than one, `torch.distributed` has been initialised, and every rank calls the same
    methods in the same order.
    """

    rank: int = 0
    size: int = 1

    def share(self, members: Sequence[int], costs: Sequence[int]) -> list[int]:
        """The part of `members` that this rank works on, cut where the costs are balanced.

        Neighbours stay together: siblings stand side by side, and share their prompt.
        """
        ends = list(accumulate(costs))
        total = ends[-1] if ends else 0
        low, high = (total * (self.rank + i) / self.size for i in (0, 1))
        # A member belongs to the rank in whose part its middle lies.
        middles = [end - cost / 2 for end, cost in zip(ends, costs, strict=True)]
        return [m for m, middle in zip(members, middles, strict=True) if low <= middle < high]

    def gather(self, found: Any) -> list[Any]:
        """What each rank has found, in the order of the ranks; must be picklable."""
        if self.size == 1:
            return [found]
        gathered: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(gathered, found)
        return gathered

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sums over all ranks, each of which has the same keys or a part of them."""
        totals: dict[str, float] = {}
        for part in self.gather(dict(values)):
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return max(int(other) for other in self.gather(number))


ALONE = Ranks()
