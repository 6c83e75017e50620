"""Counts what operations cost: floating-point operations, and bytes sent to other ranks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d, get_process_group_ranks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_NAMES = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
}
"""How operations of torch.distributed begin, and what they are called in plans."""
_UNMASKED = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
"""Attention of towers, which has no mask; that of texts is counted by its pairs of tokens."""


@dataclass(frozen=True, slots=True)
class Link:
    """A kind of collective, and the ranks of rank 0's group that take part in it."""

    collective: str
    ranks: tuple[int, ...]

    def sent_bytes(self, whole: float) -> float:
        """Return what one rank sends where the collective's whole tensor has `whole` bytes."""
        others = (len(self.ranks) - 1) / len(self.ranks)
        if self.collective == "all-reduce":
            return 2 * others * whole
        return whole if self.collective == "broadcast" else others * whole


@dataclass(slots=True)
class Costs:
    """Sums over operations of one rank."""

    flops: int = 0
    """Operations of matrix products, as torch's `FlopCounterMode` counts them."""
    bytes_by_link: Counter[Link] = field(default_factory=Counter)
    """Bytes of the tensors that collectives carry, whole, by the link they use."""
    tower_flops: int = 0
    """The part of `flops` that is spent in forward passes of a vision tower."""

    def copy(self) -> Costs:
        """Return the sums as they are now."""
        return Costs(self.flops, Counter(self.bytes_by_link), self.tower_flops)

    def __add__(self, other: Costs) -> Costs:
        """Return the sums of both."""
        links = self.bytes_by_link + other.bytes_by_link
        return Costs(self.flops + other.flops, links, self.tower_flops + other.tower_flops)

    def times(self, factor: float) -> Costs:
        """Return multiples of the sums."""
        links = {link: round(factor * size) for link, size in self.bytes_by_link.items()}
        tower_flops = round(factor * self.tower_flops)
        return Costs(round(factor * self.flops), Counter(links), tower_flops)

    def __sub__(self, other: Costs) -> Costs:
        """Return what came after `other`."""
        links = self.bytes_by_link - other.bytes_by_link
        return Costs(self.flops - other.flops, links, self.tower_flops - other.tower_flops)

    def add(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, result: Any
    ) -> None:
        """Count an operation."""
        packet = getattr(func, "_overloadpacket", None)
        if packet is torch.ops.aten._grouped_mm:
            self.flops += _grouped_flops(*args[:2])
        elif packet in _UNMASKED and (kwargs or {}).get("attn_mask") is None:
            self.flops += _attention_flops(packet, args)
        elif (formula := flop_registry.get(packet)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        elif (name := collective_of(func)) is not None:
            sizes = [t.nbytes for t in tree_leaves((args, kwargs, result)) if _is_tensor(t)]
            group = _group_of(tree_leaves((args, kwargs)))
            if group is not None and len(group) > 1:
                self.bytes_by_link[Link(name, group)] += max(sizes, default=0)


@functools.cache
def collective_of(func: Any) -> str | None:
    """Return which collective an operation is; None if it is none."""
    library, _, name = str(func).partition(".")
    if library not in ("c10d", "_c10d_functional"):
        return None
    name = name.lstrip("_")
    return next((_NAMES[start] for start in _NAMES if name.startswith(start)), None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _group_of(arguments: Iterable[Any]) -> tuple[int, ...] | None:
    """Return the ranks of the process group among the arguments of a collective."""
    c10d: Any = distributed_c10d  # torch exports no public name for it
    for argument in arguments:
        group: ProcessGroup | None = None
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            group = ProcessGroup.unbox(argument)
        elif isinstance(argument, str):
            try:
                group = c10d._resolve_process_group(argument)
            except RuntimeError:  # the name of a reduction
                continue
        if group is not None:
            return tuple(get_process_group_ranks(group))
    return None


def _grouped_flops(left: Tensor, right: Tensor) -> int:
    """Return the operations of experts' products: [N, K] with [E, K, O], or [K, N] with [N, O]."""
    num_rows, inner = left.shape
    return 2 * num_rows * inner * right.shape[-1]


def _attention_flops(packet: Any, args: Sequence[Any]) -> int:
    """Return the operations of attention of all to all."""
    if packet is _UNMASKED[0]:
        query, key, value = (tensor.shape for tensor in args[:3])
        return int(sdpa_flop_count(query, key, value))
    gradient, query, key, value = (tensor.shape for tensor in args[:4])
    return int(sdpa_backward_flop_count(gradient, query, key, value))
