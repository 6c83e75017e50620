"""Lets a forward pass watch, count and replace the experts that a mixture's routers choose.

Architectures choose experts in different ways, but all of them by `torch.topk` in a module that
they call a router. Its calls are watched there, so that no architecture has to be known here. Where
other experts are put in the place of the chosen ones, the values that `topk` returns are those of
the router's own scores at these experts: the router's weights stay in the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from areal_gym.errors import TrainError
from areal_gym.models.context_parallel import WHOLE, ContextGroup
from areal_gym.models.hf.token_mixing import current_mixing

_LAYER = "_areal_gym_layer"


class RoutingStats:
    """Counts what routers choose in forward passes with a gradient.

    Tokens that a layer computes again in the backward pass count twice, in every layer.
    """

    def __init__(self) -> None:
        self._counts: dict[int, Tensor] = {}
        self._agreed: Tensor | None = None

    def count(self, layer: int, chosen_NK: Tensor, num_experts: int) -> None:
        """Count the tokens that each expert of a layer is given."""
        index = chosen_NK.flatten()
        # `bincount` would wait for the GPU.
        counts_E = index.new_zeros(num_experts).scatter_add_(0, index, torch.ones_like(index))
        self._counts[layer] = self._counts.get(layer, 0) + counts_E

    def compare(self, own_NK: Tensor, recorded_NK: Tensor) -> None:
        """Count the recorded experts, and those of them that the router chooses as well."""
        is_known_N = recorded_NK[:, 0] >= 0
        is_common_NK = (recorded_NK[:, :, None] == own_NK[:, None, :]).any(-1)
        pair = torch.stack((is_common_NK.sum(), is_known_N.sum() * recorded_NK.shape[1]))
        self._agreed = pair if self._agreed is None else self._agreed + pair

    def take_counts(self, context: ContextGroup = WHOLE) -> Tensor | None:
        """Return the tokens of each layer's experts since the last call, [L, E]; None if none.

        All ranks of `context` call this, and get the sum of their counts.
        """
        counts, self._counts = self._counts, {}
        if not counts:
            return None
        return context.sum(torch.stack([counts[layer] for layer in sorted(counts)])).cpu()

    def take_agreement(self, context: ContextGroup = WHOLE) -> tuple[int, int]:
        """Return how many recorded experts the routers chose, and all, since the last call."""
        pair, self._agreed = self._agreed, None
        agreed, recorded = (0, 0) if pair is None else context.sum(pair).tolist()
        return agreed, recorded


def replay(layer: int, own_NK: Tensor, recorded_NLK: Tensor) -> Tensor:
    """Return the recorded experts of one layer, [N, K], and the router's own where there are none.

    Raises:
        TrainError: they were recorded from another model.
    """
    num_layers, top_k = recorded_NLK.shape[1:]
    if layer >= num_layers or top_k != own_NK.shape[1]:
        raise TrainError(
            f"the engine recorded {top_k} experts of each token in each of {num_layers} layers; "
            f"the policy chooses {own_NK.shape[1]} in layer {layer}",
            hints=["engine and trainer are to run the same model: engine.model=DIR"],
        )
    recorded_NK = recorded_NLK[:, layer].to(own_NK.dtype)
    return torch.where(recorded_NK >= 0, recorded_NK, own_NK)


class _Routed(TorchFunctionMode):
    """Asks the current mixing about the choice among all experts.

    Choices among groups of experts, and within each, are of another shape.
    """

    def __init__(self, layer: int, num_experts: int) -> None:
        super().__init__()
        self._layer, self._num_experts = layer, num_experts

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or result[1].ndim != 2:
            return result
        scores_NE, own_NK = args[0], result[1]
        if scores_NE.shape[-1] != self._num_experts:
            return result
        chosen_NK = current_mixing().route(self._layer, own_NK, self._num_experts)
        if chosen_NK is own_NK:
            return result
        return torch.return_types.topk((scores_NE.gather(-1, chosen_NK), chosen_NK))


def watch_routers(layers: nn.ModuleList) -> list[nn.Module]:
    """Let routers ask the current mixing from now on; return them, in the order of the layers.

    A router whose weight belongs to a part of it is left alone.
    """
    routers = []
    for number, layer in enumerate(layers):
        for module in layer.modules():
            has_weight = isinstance(getattr(module, "weight", None), Tensor)
            if "router" in type(module).__name__.lower() and has_weight:
                module.__dict__[_LAYER] = number
                module.__class__ = _routed_class(type(module))
                routers.append(module)
    return routers


def _routed_class(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self.weight, Tensor)
        with _Routed(self.__dict__[_LAYER], self.weight.shape[0]):
            return kind.forward(self, *args, **kwargs)

    return type(f"Routed{kind.__name__}", (kind,), {"forward": forward})
