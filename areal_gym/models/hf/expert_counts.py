"""Counts the tokens that each expert of a mixture is given.

Architectures choose experts in different ways, but all of them by `torch.topk` in a module that
they call a router. Its calls are watched there, so that no architecture has to be known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_COUNTS = "_areal_gym_expert_counts"


class _LastChoice(TorchFunctionMode):
    """Remembers the last choice among all experts; a choice among groups of experts is smaller."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.indices: Tensor | None = None
        self._num_experts = num_experts

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk) and args[0].shape[-1] == self._num_experts:
            self.indices = result[1]
        return result


def watch_routers(layers: nn.ModuleList) -> list[nn.Module]:
    """Let routers count their choices from now on; return them, in the order of the layers.

    A router whose weight belongs to a part of it is left alone: its experts are not counted.
    """
    routers = [
        module
        for module in layers.modules()
        if "router" in type(module).__name__.lower()
        and isinstance(getattr(module, "weight", None), Tensor)
    ]
    for router in routers:
        router.__class__ = _watched_class(type(router))
    return routers


def take_counts(routers: Sequence[nn.Module]) -> Tensor | None:
    """Return the tokens of each layer's experts since the last call, [L, E]; None without any.

    Tokens that a layer computes again in the backward pass count twice, in every layer.
    """
    counts = [router.__dict__.pop(_COUNTS) for router in routers if _COUNTS in router.__dict__]
    return torch.stack(counts).cpu() if counts else None


def _watched_class(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        assert isinstance(self.weight, Tensor)
        num_experts = self.weight.shape[0]
        with _LastChoice(num_experts) as choice:
            result = kind.forward(self, *args, **kwargs)
        if choice.indices is not None:
            index = choice.indices.flatten()
            # `bincount` would wait for the GPU.
            counts = index.new_zeros(num_experts).scatter_add_(0, index, torch.ones_like(index))
            self.__dict__[_COUNTS] = self.__dict__.get(_COUNTS, 0) + counts
        return result

    return type(f"Watched{kind.__name__}", (kind,), {"forward": forward})
