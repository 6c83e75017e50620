"""The ranks that train one policy together, as one of them sees them.

Every rank has the small values of the whole batch and the tokens of its share of the rows, whose
forward and backward passes it computes. Here ranks exchange small data: metrics, and values per
token that are known before the first update. `areal_gym.trainer.parallel.fsdp` exchanges weights
and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from areal_gym.config import Layout
from areal_gym.models.context_parallel import WHOLE, ContextGroup

_ONE_RANK = Layout()


@dataclass(frozen=True)
class Ranks:
    """This process as one of `layout.num_ranks` ranks; by default it is the only one.

    With more than one, `torch.distributed` must be initialised, and all ranks must call the same
    methods, and read the same meshes and groups, in the same order. The ranks of one tensor or
    context group form one data rank: they get the same rows.
    """

    rank: int = 0
    layout: Layout = _ONE_RANK
    device_type: str = "cpu"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.layout.num_ranks

    @property
    def data_rank(self) -> int:
        """The number of this rank's part of a batch's rows."""
        return self.rank // (self.layout.context * self.layout.tensor)

    @property
    def num_data_ranks(self) -> int:
        """The number of parts into which a batch's rows are divided."""
        return self.layout.num_data_ranks

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks, in dimensions named as the settings are."""
        names = ("replicate", "shard", "context", "tensor")
        sizes = tuple(getattr(self.layout, name) for name in names)
        return init_device_mesh(self.device_type, sizes, mesh_dim_names=names)

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """The ranks that FSDP2 shards over; with two dimensions, it replicates over the first."""
        layout = self.layout
        sizes = (layout.replicate, layout.fsdp_size, layout.tensor)
        names = ("replicate", "fsdp", "tensor")
        mesh = init_device_mesh(self.device_type, sizes, mesh_dim_names=names)
        return mesh["fsdp"] if layout.replicate == 1 else mesh["replicate", "fsdp"]

    @cached_property
    def context_group(self) -> ContextGroup:
        """The ranks that divide the tokens of this rank's rows."""
        if self.layout.context == 1:
            return WHOLE
        place = self.rank // self.layout.tensor % self.layout.context
        return ContextGroup(self.mesh["context"].get_group(), place, self.layout.context)

    @cached_property
    def _data_group(self) -> torch.distributed.ProcessGroup | None:
        """One rank of each data rank; None if that is all ranks."""
        if self.num_data_ranks == self.size:
            return None
        return self.mesh["replicate", "shard"]._flatten("data").get_group()

    def share(self, members: Sequence[int], costs: Sequence[int]) -> list[int]:
        """Return this data rank's part of `members`; the parts have about the same costs.

        Neighbours stay together, because siblings are adjacent and share their prompt.
        """
        ends = list(accumulate(costs))
        total = ends[-1] if ends else 0
        low, high = (total * (self.data_rank + i) / self.num_data_ranks for i in (0, 1))
        # A member belongs to the rank whose part contains its middle.
        middles = [end - cost / 2 for end, cost in zip(ends, costs, strict=True)]
        return [m for m, middle in zip(members, middles, strict=True) if low <= middle < high]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all data ranks in order; they must be picklable."""
        if self.num_data_ranks == 1:
            return [value]
        gathered: list[Any] = [None] * self.num_data_ranks
        torch.distributed.all_gather_object(gathered, value, group=self._data_group)
        return gathered

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums over all data ranks by name; a rank may lack some names."""
        totals: dict[str, float] = {}
        for part in self.gather(dict(values)):
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def equal_passes(
        self, microbatches: Sequence[list[int]], spare: int
    ) -> Iterator[tuple[list[int], bool]]:
        """Yield the members of this rank's micro-batches, and whether they count.

        All ranks make the same number of passes, because each pass gathers the weights from all. A
        rank that has no micro-batch left passes the member `spare`, which does not count.
        """
        # Exchanged before the first pass, else a rank that has finished would wait for the others.
        num_passes = max(self.gather(len(microbatches)))
        for members in microbatches:
            yield members, True
        for _ in range(num_passes - len(microbatches)):
            yield [spare], False


ALONE = Ranks()
