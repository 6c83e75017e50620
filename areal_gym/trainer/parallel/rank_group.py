"""The ranks that train one policy together, seen from one of them.

Every rank gets the whole batch and computes its share of the forward and backward passes. Ranks
exchange small data here: metrics, and values per token known before the first update.
`areal_gym.trainer.parallel.fsdp` exchanges weights and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process as one of `size` ranks; by default it is the only one.

    With more than one, `torch.distributed` must be initialised, and every rank must call the same
    methods in the same order.
    """

    rank: int = 0
    size: int = 1

    def share(self, members: Sequence[int], costs: Sequence[int]) -> list[int]:
        """Return this rank's part of `members`; the costs of all parts are balanced.

        Neighbours stay together: siblings are adjacent, and share their prompt.
        """
        ends = list(accumulate(costs))
        total = ends[-1] if ends else 0
        low, high = (total * (self.rank + i) / self.size for i in (0, 1))
        # A member belongs to the rank whose part contains its middle.
        middles = [end - cost / 2 for end, cost in zip(ends, costs, strict=True)]
        return [m for m, middle in zip(members, middles, strict=True) if low <= middle < high]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of the ranks; values must be picklable."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(gathered, value)
        return gathered

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return sums over all ranks, whose keys may differ."""
        totals: dict[str, float] = {}
        for part in self.gather(dict(values)):
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def equal_passes(
        self, microbatches: Sequence[list[int]], spare: int
    ) -> Iterator[tuple[list[int], bool]]:
        """Yield the members of this rank's micro-batches, and whether they count.

        All ranks make the same number of passes, for each gathers the others' weights: a rank that
        has none left passes the member `spare`, which does not count.
        """
        for members in microbatches:
            yield members, True
        for _ in range(max(self.gather(len(microbatches))) - len(microbatches)):
            yield [spare], False


ALONE = Ranks()
