"""Settings that divide a model among the trainer's ranks, and the layout that results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from areal_gym.config.settings_model import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The sizes of the device mesh: num_ranks is replicate x shard x context x tensor.

    The last dimension varies fastest from rank to rank, so the ranks that exchange most data are
    neighbours.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """The ranks among which a replica's experts are divided; not a factor of `num_ranks`."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def num_data_ranks(self) -> int:
        """The number of parts into which a batch's rows are divided: replicate x shard."""
        return self.replicate * self.shard

    @property
    def fsdp_size(self) -> int:
        """The number of ranks among which FSDP2 divides a replica's weights: shard x context."""
        return self.shard * self.context


class ParallelConfig(Settings):
    """The sizes by which `trainer.num_ranks` processes share a model: num_ranks is replicate x
    shard x context x tensor (docs/parallelism.md)."""

    replicate: int = Field(1, ge=1)
    """Copies of the sharded model, whose gradients are summed once per update (HSDP); one copy per
    machine keeps the other traffic inside machines."""
    shard: int | Literal["auto"] = "auto"
    """Ranks that divide weights, gradients and optimizer states, and the batch (FSDP2); "auto" is
    what the other factors leave of num_ranks."""
    tensor: int = Field(1, ge=1)
    """Ranks that divide each layer's matrices, and compute the same rows together (tensor
    parallelism)."""
    expert: int = Field(1, ge=1)
    """Ranks among which the experts of a mixture are divided: tokens travel to them (expert
    parallelism); 1 gathers a layer's experts on each rank. A multiple of tensor that divides shard
    x context x tensor."""
    context: int = Field(1, ge=1)
    """Ranks that divide the tokens of the same rows, for long contexts (Ulysses)."""

    reduce: Literal["auto", "microbatch", "update"] = "auto"
    """When shards sum their gradients: "microbatch" does so in every micro-batch; "update" once per
    update, until which each rank keeps unsharded gradients (4 bytes a parameter, divided by
    tensor); "auto" chooses "update" if these take at most 4 GB. Replicas always sum once per
    update."""

    def layout(self, num_ranks: int) -> Layout:
        """Return the arrangement of `num_ranks` ranks.

        Raises:
            ValueError: the product of the sizes is not `num_ranks`, or the experts cannot be
                divided in this way.
        """
        others = self.replicate * self.context * self.tensor
        product = "replicate x context x tensor"
        if self.shard == "auto":
            if num_ranks % others:
                raise ValueError(
                    f"trainer.parallel: {product} = {self.replicate} x {self.context} x "
                    f"{self.tensor} = {others} does not divide trainer.num_ranks = {num_ranks}; "
                    f"use trainer.num_ranks={max(1, num_ranks // others) * others}"
                )
            shard = num_ranks // others
        else:
            shard = self.shard
            if shard < 1:
                raise ValueError(f"trainer.parallel.shard = {shard} is less than 1; use auto")
            if shard * others != num_ranks:
                raise ValueError(
                    f"trainer.parallel: {product} x shard = {self.replicate} x {self.context} x "
                    f"{self.tensor} x {shard} = {shard * others}, but trainer.num_ranks = "
                    f"{num_ranks}; use trainer.num_ranks={shard * others}, or "
                    "trainer.parallel.shard=auto"
                )
        layout = Layout(
            replicate=self.replicate,
            shard=shard,
            context=self.context,
            tensor=self.tensor,
            expert=self.expert,
        )
        _require_expert_groups(layout)
        return layout


def _require_expert_groups(layout: Layout) -> None:
    if layout.expert == 1:
        return
    replica_size = layout.fsdp_size * layout.tensor
    fitting = [
        size
        for size in range(layout.tensor, replica_size + 1, layout.tensor)
        if replica_size % size == 0
    ]
    if layout.expert not in fitting:
        raise ValueError(
            f"trainer.parallel.expert = {layout.expert} must divide shard x context x tensor = "
            f"{layout.shard} x {layout.context} x {layout.tensor} = {replica_size}, the ranks of "
            f"one replica, and be a multiple of tensor = {layout.tensor}; use 1"
            f"{', or one of ' + ', '.join(map(str, fitting)) if fitting != [1] else ''}"
        )
