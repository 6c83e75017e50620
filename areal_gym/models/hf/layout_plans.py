"""Checks a layout of ranks against what transformers can divide, and mends one of its styles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig
from transformers import __version__ as transformers_version
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from areal_gym.config import Layout
from areal_gym.errors import ConfigError

_PLANS_FROM = (5, 23)
"""The oldest version whose plans were compared with one rank, and which gives experts that are
divided the right gradients."""
_HEADS = ("num_attention_heads", "num_key_value_heads")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_CHANGED_IN_PLACE = ("llama4_text",)


def require_layout(config: PretrainedConfig, layout: Layout) -> None:
    """Raise ConfigError where transformers cannot divide this architecture like that.

    Layers that are not in a plan are computed whole by every rank of a tensor group.
    """
    text = config.get_text_config()
    planned = {"expert": "base_model_ep_plan", "tensor": "base_model_tp_plan"}
    for setting, plan in planned.items():
        if getattr(layout, setting) > 1 and not getattr(text, plan, None):
            raise ConfigError(
                f"trainer.parallel.{setting} = {getattr(layout, setting)}: transformers "
                f"{transformers_version} has no plan ({plan}) by which {text.model_type} could be "
                "divided so",
                hints=[f"every rank gathers whole layers: trainer.parallel.{setting}=1"],
            )
    if layout.tensor > 1 and text.model_type in _CHANGED_IN_PLACE:
        raise ConfigError(
            f"trainer.parallel.tensor = {layout.tensor}: {text.model_type} changes divided tensors "
            f"in place, of which transformers {transformers_version} makes no gradient",
            hints=["every rank gathers whole layers: trainer.parallel.tensor=1"],
        )
    used = [name for name in ("replicate", "tensor", "expert") if getattr(layout, name) > 1]
    if used and tuple(map(int, transformers_version.split(".")[:2])) < _PLANS_FROM:
        raise ConfigError(
            f"trainer.parallel.{used[0]} = {getattr(layout, used[0])} needs transformers 5.23, "
            f"whose plans were compared with one rank; this is {transformers_version}",
            hints=["pip install 'transformers>=5.23'", f"or: trainer.parallel.{used[0]}=1"],
        )
    _require_divisor(text, layout, "tensor", _HEADS)
    _require_divisor(text, layout, "expert", _NUM_EXPERTS)
    _require_context_divides_heads(text, layout)


def require_divided(network: nn.Module, layout: Layout) -> None:
    """Raise ConfigError where a plan for tensor parallelism has matched no weight of a layer."""
    if layout.tensor > 1 and not any(
        isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ())
        for name, p in network.named_parameters()
        if ".layers." in name
    ):
        raise ConfigError(
            f"trainer.parallel.tensor = {layout.tensor}: the plan that transformers "
            f"{transformers_version} has for this architecture divides no weight of its layers",
            hints=["use trainer.parallel.tensor=1, and more shards instead"],
        )


def _require_divisor(
    text: PretrainedConfig, layout: Layout, setting: str, names: tuple[str, ...]
) -> None:
    size = getattr(layout, setting)
    numbers = {name: getattr(text, name, None) for name in names}
    for name, number in numbers.items():
        if isinstance(number, int) and number % size:
            fitting = [n for n in range(1, size) if all(v % n == 0 for v in numbers.values() if v)]
            raise ConfigError(
                f"trainer.parallel.{setting} = {size} does not divide {name} = {number} of this "
                f"{text.model_type}",
                hints=[f"use trainer.parallel.{setting}={fitting[-1]}, and more shards instead"],
            )


def _require_context_divides_heads(text: PretrainedConfig, layout: Layout) -> None:
    num_heads = getattr(text, "num_attention_heads", None)
    if not isinstance(num_heads, int):
        return
    num_left = num_heads // layout.tensor
    if num_left % layout.context:
        divided = f" / tensor = {layout.tensor}" if layout.tensor > 1 else ""
        raise ConfigError(
            f"trainer.parallel.context = {layout.context} does not divide num_attention_heads = "
            f"{num_heads}{divided} of this {text.model_type}",
            hints=[f"use trainer.parallel.context={math.gcd(num_left, layout.context)}"],
        )


class _SummedGradient(torch.autograd.Function):
    """The tensor itself; its gradient is summed over a group of ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class PartialGradientParallel(TensorParallelLayer):  # type: ignore[misc]
    """A whole parameter that each rank applies to its own heads: its gradient is summed.

    transformers (5.23) sums what has been accumulated in `.grad`, after each backward pass: from
    the second micro-batch on, earlier ones would be summed again.
    """

    @contextmanager
    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
        """Let the module compute with parameters whose gradient is summed."""
        own = module._parameters
        module._parameters = {
            name: None if p is None else _SummedGradient.apply(p, mesh.get_group())  # type: ignore[no-untyped-call]
            for name, p in own.items()
        }
        try:
            yield
        finally:
            module._parameters = own


def sum_gradients_per_pass() -> None:
    """Replace the style of transformers that is wrong for several micro-batches."""
    ALL_PARALLEL_STYLES.register("replicated_with_grad_allreduce", PartialGradientParallel())
