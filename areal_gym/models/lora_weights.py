"""LoRA adapters in a network: which parameters are theirs, and what the merged weights are.

W' = W + alpha / r * B A, for linear layers and for the stacked matrices of experts
(Hu et al. 2021).
peft puts its wrappers around layers; their names hold `base_layer`, which checkpoints do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from areal_gym.errors import TrainError

ADAPTER = "default"
"""The name of the only adapter, as peft has it."""
_PARTS = (f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")
_BASE = ".base_layer"


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name belongs to an adapter."""
    return name.endswith(_PARTS)


def merged_state(
    network: nn.Module,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    *,
    without: Collection[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Yield the state of a network as if it had no adapter, one tensor at a time, merged.

    Args:
        network: with or without an adapter.
        whole: gathers a tensor from the ranks that share it; every rank must use up the iterator.
        without: names that are left out, and not gathered.

    Raises:
        TrainError: a name of peft's would be left over.
    """
    wrappers = {name: m for name, m in network.named_modules() if hasattr(m, "lora_A")}
    for name, tensor in network.state_dict().items():
        plain = name.replace(_BASE, "")
        if is_adapter(name) or plain in without:
            continue
        if "lora_" in plain:
            raise TrainError(f"the adapter's tensor {name} cannot be merged into the weights")
        merged = whole(tensor.detach())
        path = name
        while _BASE in path:
            path = path[: path.rindex(_BASE)]
            wrapper = wrappers[path]
            leaf = name.rpartition(".")[2]
            if leaf == getattr(wrapper, "parameter_name", "weight"):
                merged = merged + _delta(wrapper, whole).to(merged)
        yield plain, merged


def _delta(wrapper: Any, whole: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what the adapter of one wrapped layer adds to its weight, in float32."""
    with torch.no_grad(), ExitStack() as stack:
        for matrices in (wrapper.lora_A, wrapper.lora_B):
            stack.enter_context(_gathered(matrices[ADAPTER], whole))
        delta: Tensor = wrapper.get_delta_weight(ADAPTER)
        return delta


@contextmanager
def _gathered(linear: nn.Linear, whole: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Give a linear layer its whole weight for a while."""
    own = linear.weight
    linear.weight = nn.Parameter(whole(own.detach()), requires_grad=False)
    try:
        yield
    finally:
        linear.weight = own
