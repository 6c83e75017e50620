"""Counts the bytes of tensors that are alive, by what they are for, and their sum's peak.

Fake tensors are counted like real ones, so that a model that fits nowhere can be measured.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from areal_gym.plan.operation_costs import Costs, collective_of

Kind = Literal["weights", "frozen", "gradients", "states", "gathered", "logits", "activations"]


class MemoryTracker(TorchDispatchMode):
    """Watches all operations in its context, and adds up what they cost.

    What FSDP2 and all-gathers return is "gathered", a tensor whose last axis has `vocab_size`
    elements is "logits"; other new tensors are "activations" until `label` says what they are. A
    storage counts once, for the label that it was given last.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: dict[str, int] = {}
        """Bytes by kind when their sum was largest."""
        self.largest: dict[str, int] = {}
        """The most bytes of each kind at any time."""
        self.costs = Costs()
        self._vocab_size = vocab_size
        self._alive: dict[int, tuple[int, Kind]] = {}
        self._totals: Counter[str] = Counter()
        self._labelled: dict[int, dict[int, int]] = {}
        self._is_off = False

    @property
    def now(self) -> dict[str, int]:
        """The bytes by kind that are alive."""
        return dict(self._totals)

    def label(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Say what tensors are for; those that are not known yet are counted from now on.

        Of a storage, those parts count that are labelled: a shard that was read from a file is a
        part of a mapped storage, and gradients of a layer lie in one.
        """
        for tensor in tensors:
            for local in () if tensor is None else _stored(tensor):
                storage = local.untyped_storage()
                parts = self._labelled.setdefault(storage._cdata, {})
                parts[int(local.storage_offset())] = local.nbytes
                self._count(storage, kind, min(storage.size(), sum(parts.values())))

    def __enter__(self) -> MemoryTracker:
        """Begin to watch, also the resizing of storages, by which FSDP2 frees what it gathered."""
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized()  # type: ignore[method-assign]
        propagator: Any = ShardingPropagator
        self._propagate = propagator._propagate_tensor_meta_non_cached
        propagator._propagate_tensor_meta_non_cached = self._unwatched(self._propagate)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        """Stop watching."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        propagator: Any = ShardingPropagator
        propagator._propagate_tensor_meta_non_cached = self._propagate
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count the new storages that it returns."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what DTensor makes of it comes here
        result = func(*args, **(kwargs or {}))
        if self._is_off:
            return result
        self.costs.add(func, args, kwargs, result)
        is_gathered = func.namespace == "fsdp" or collective_of(func) == "all-gather"
        for tensor in _tensors(result):
            has_logits = tensor.ndim > 1 and tensor.shape[-1] == self._vocab_size
            kind: Kind = "logits" if has_logits else "activations"
            for local in _stored(tensor):
                storage = local.untyped_storage()
                if storage._cdata not in self._alive:
                    self._count(storage, "gathered" if is_gathered else kind, storage.size())
        return result

    def _count(self, storage: torch.UntypedStorage, kind: Kind, num_bytes: int) -> None:
        key = storage._cdata
        if key in self._alive:
            old_bytes, old_kind = self._alive[key]
            self._totals[old_kind] -= old_bytes
        else:
            weakref.finalize(storage, self._forget, key)
        self._alive[key] = num_bytes, kind
        self._totals[kind] += num_bytes
        self.largest[kind] = max(self.largest.get(kind, 0), self._totals[kind])
        if self._totals.total() > sum(self.peak.values()):
            self.peak = dict(self._totals)

    def _forget(self, key: int) -> None:
        num_bytes, kind = self._alive.pop(key)
        self._labelled.pop(key, None)
        self._totals[kind] -= num_bytes

    def _unwatched(self, function: Any) -> Any:
        """Return the function by which DTensor learns shapes, whose whole tensors do not count."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._is_off = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_off = False

        return call

    def _resized(self) -> Any:
        resize = self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._alive:
                self._count(storage, "gathered", size)

        return resize_


@contextmanager
def labelled_training(
    tracker: MemoryTracker, module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[None]:
    """Label gradients as they come and optimizer states as they are made, in this context."""
    trained = [p for p in module.parameters() if p.requires_grad]
    tracker.label(module.parameters(), "weights")
    hooks: list[Any] = [
        p.register_post_accumulate_grad_hook(lambda p: tracker.label([p.grad], "gradients"))
        for p in trained
    ]

    def label_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tracker.label(_tensors(list(optimizer.state.values())), "states")

    keep_whole = FSDPParam.to_accumulated_grad_if_needed

    def label_whole(sharded: FSDPParam) -> None:
        keep_whole(sharded)
        unsharded = getattr(sharded, "_unsharded_param", None)
        tracker.label([sharded.unsharded_accumulated_grad], "gradients")
        tracker.label([None if unsharded is None else unsharded.grad], "gradients")

    # Gradients that are not reduced yet are none of the parameters that the module shows.
    FSDPParam.to_accumulated_grad_if_needed = label_whole  # type: ignore[method-assign, assignment]
    for optimizer in optimizers:
        label_states(optimizer)
        hooks.append(optimizer.register_step_post_hook(label_states))
    try:
        yield
    finally:
        FSDPParam.to_accumulated_grad_if_needed = keep_whole  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


def _stored(tensor: Any) -> list[Tensor]:
    """Return the tensors that hold the values of a tensor: of a shard, or of quantised states."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [part for name in names if isinstance(part := getattr(tensor, name), Tensor)]
    return [inner for part in parts for inner in _stored(part)]


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
