"""FSDP2: each rank keeps a shard of every weight, and gathers a layer while it needs it.

Zhao et al. 2023; `torch.distributed.fsdp.fully_shard`. Master weights, gradients and optimizer
states are float32 and sharded; with `dtype="bfloat16"` layers are gathered and computed in
bfloat16, and gradients are summed in float32.
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.parallel.rank_group import Ranks


def _require_compiler() -> None:
    name = os.environ.get("CXX", "g++")  # as torch's inductor does
    if shutil.which(name) is None:
        raise ConfigError(
            f"trainer.compile=true needs a C++ compiler, but {name!r} is not installed",
            hints=[
                "install g++, or name another: CXX=COMPILER",
                "trainer.compile=false needs none",
            ],
        )


def prepare_decoder(decoder: PolicyModel, config: TrainerConfig, ranks: Ranks) -> None:
    """Apply the settings to a decoder's layers, and shard its weights.

    The weights outside of layers (embeddings, the last norm, the output projection) are gathered
    as one piece and stay whole until the end of the backward pass: the loss needs the output
    projection after the decoder has returned.

    Raises:
        ConfigError: the settings compile layers for a CPU, and there is no compiler.
    """
    decoder.recomputes_layers = config.recompute_layers
    if config.compile:
        if next(decoder.parameters()).device.type == "cpu":
            _require_compiler()
        for layer in decoder.layers:
            if isinstance(mlp := getattr(layer, "mlp", None), nn.Module):
                mlp.compile(dynamic=True)
    if ranks.size == 1:
        return
    options = _fsdp_options(decoder, config, ranks)
    for layer in decoder.layers:
        fully_shard(layer, **options)
    fully_shard(decoder, reshard_after_forward=False, **options)


def shard_head(head: nn.Linear, config: TrainerConfig, ranks: Ranks) -> None:
    """Shard a head that is applied to hidden states."""
    if ranks.size > 1:
        fully_shard(head, **_fsdp_options(head, config, ranks))


def drop_gathered(*modules: object) -> None:
    """Free weights that a forward pass without a backward pass has left gathered.

    Otherwise the next forward pass would use these weights, which may be outdated.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def autocast(device: torch.device, config: TrainerConfig) -> AbstractContextManager[Any]:
    """Compute in the type of the settings."""
    if config.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def full(tensor: Tensor) -> Tensor:
    """Return a whole weight; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _fsdp_options(module: nn.Module, config: TrainerConfig, ranks: Ranks) -> dict[str, Any]:
    device = next(module.parameters()).device.type
    offload = OffloadPolicy()
    if config.cpu_offload and device == "cuda":
        offload = CPUOffloadPolicy()
    precision = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "mesh": init_device_mesh(device, (ranks.size,)),
        "mp_policy": precision,
        "offload_policy": offload,
    }
