"""Find the parameters of LoRA adapters in a network, and merge them into the weights.

W' = W + alpha / r * B A, for linear layers and for the stacked matrices of experts
(Hu et al. 2021).
peft puts its wrappers around layers; their names hold `base_layer`, which checkpoints do not know.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkTensor:
    """A tensor of a network as it is without adapters."""

    name: str
    """Its name in a network that has no adapter."""
    sources: tuple[str, ...]
    """Names in the `state_dict`: the tensor, then the matrices A and B of each adapter on it."""
    wrappers: tuple[Any, ...] = ()
    """peft's modules of these adapters; only their settings are read."""

    def merged(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensor with its adapters, from the whole tensors of `sources`."""
        merged, *matrices = tensors
        for wrapper, a, b in zip(self.wrappers, matrices[::2], matrices[1::2], strict=True):
            merged = merged + _delta(wrapper, merged, a, b).to(merged)
        return merged


def network_tensors(
    network: nn.Module, *, prefix: str = "", without: Collection[str] = ()
) -> Iterator[NetworkTensor]:
    """Yield the tensors of a network as if it had no adapter.

    Args:
        network: with or without an adapter.
        prefix: stands before the names of `sources`.
        without: names that are left out.

    Raises:
        TrainError: a name of peft's would be left over.
    """
    wrappers = {name: m for name, m in network.named_modules() if hasattr(m, "lora_A")}
    for name in network.state_dict():
        plain = name.replace(_BASE, "")
        if is_adapter(name) or plain in without:
            continue
        if "lora_" in plain:
            raise TrainError(f"the adapter's tensor {name} cannot be merged into the weights")
        sources, merged = [name], []
        path, leaf = name, name.rpartition(".")[2]
        while _BASE in path:
            path = path[: path.rindex(_BASE)]
            if leaf == getattr(wrappers[path], "parameter_name", "weight"):
                sources += [path + part for part in _PARTS]
                merged.append(wrappers[path])
        yield NetworkTensor(
            name=plain, sources=tuple(prefix + s for s in sources), wrappers=tuple(merged)
        )


@torch.no_grad()
def _delta(wrapper: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return what an adapter with these whole matrices adds to a weight, in float32.

    peft computes it on a second module, because the network may be training meanwhile.
    """
    base = nn.Module()
    leaf = getattr(wrapper, "parameter_name", "weight")
    base.register_parameter(leaf, nn.Parameter(weight, requires_grad=False))
    twin = _copy_of(wrapper)
    twin._modules["base_layer"] = base
    for name, matrix in (("lora_A", a), ("lora_B", b)):
        linear = _copy_of(getattr(wrapper, name)[ADAPTER])
        linear.weight = nn.Parameter(matrix, requires_grad=False)
        twin._modules[name] = nn.ModuleDict({ADAPTER: linear})
    delta: Tensor = twin.get_delta_weight(ADAPTER)
    return delta


def _copy_of(module: Any) -> Any:
    """Return a second object with the module's settings, whose parts can be replaced."""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    for parts in ("_modules", "_parameters"):
        copied.__dict__[parts] = dict(module.__dict__[parts])
    return copied
