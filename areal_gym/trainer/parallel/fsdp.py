"""FSDP2: each rank keeps a shard of every weight, and gathers a layer when it is needed.

Zhao et al. 2023; `torch.distributed.fsdp.fully_shard`. Master weights, gradients and optimizer
states are float32 and sharded. With `dtype="bfloat16"`, layers are gathered and computed in
bfloat16, and gradients are summed in float32.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from areal_gym.config import Layout, TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.models.backend import AUTO, ModelLoader
from areal_gym.models.device import is_accelerator
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks

if TYPE_CHECKING:
    from areal_gym.models.hf.hf_loading import Sharding


_Pass = TypeVar("_Pass")


_WHOLE_GRADIENTS_BYTES = 4e9
"""Each rank keeps unsharded gradients until the end of an update if they have at most this size."""


def _require_compiler() -> None:
    name = os.environ.get("CXX", "g++")  # the choice of torch's inductor
    if shutil.which(name) is None:
        raise ConfigError(
            f"trainer.compile=true needs a C++ compiler, but {name!r} is not installed",
            hints=[
                "install g++, or name another: CXX=COMPILER",
                "trainer.compile=false needs none",
            ],
        )


def load_for_training(
    directory: Path,
    config: TrainerConfig,
    ranks: Ranks = ALONE,
    *,
    device: torch.device | str = "cpu",
    loader: ModelLoader = AUTO,
    is_frozen: bool = False,
) -> PolicyModel:
    """Load a checkpoint for this rank; every rank must call this.

    A transformers model is loaded in shards, the tiny decoder as a whole. Weights that are not
    trained have the type of the computation.

    Raises:
        ConfigError: the model cannot be trained.
    """
    device = torch.device(device)
    if not loader.uses_transformers(directory):
        return loader.load(directory, device=device)
    from areal_gym.models.hf.hf_loading import load_policy, load_reward_model

    computes_in = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    return (load_reward_model if loader.is_reward_model else load_policy)(
        directory,
        device=device,
        dtype=computes_in if is_frozen or config.lora is not None else torch.float32,
        sharding=sharding_of(config, ranks.layout, device),
        trusts_code=loader.trusts_code,
    )


def sharding_of(config: TrainerConfig, layout: Layout, device: torch.device) -> Sharding | None:
    """Return how the ranks share a transformers model; None for one rank."""
    from areal_gym.models.hf.hf_loading import Sharding

    if layout.num_ranks == 1:
        return None
    return Sharding(
        layout=layout,
        computes_in_bfloat16=config.dtype == "bfloat16",
        offloads=config.cpu_offload and is_accelerator(device),
    )


def require_exact_packing(model: PolicyModel, config: TrainerConfig) -> None:
    """Check that packed sequences do not affect each other; every rank must call this.

    Raises:
        ConfigError: they do, with this architecture.
    """
    device = next(model.parameters()).device
    with autocast(device, config):
        model.check_packing(
            partial(_pack, device), torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        )
    drop_gathered(model)


def _pack(device: torch.device, rows: Sequence[Sequence[int]], num_shared: int) -> PackedBatch:
    return pack([Row(token_ids=row, num_shared=num_shared) for row in rows], device)


def prepare_decoder(decoder: PolicyModel, config: TrainerConfig, ranks: Ranks) -> None:
    """Apply the settings to a decoder: shard its weights, and the tokens of its passes.

    The weights outside of layers (embeddings, last norm, output projection) are gathered as one
    piece and stay gathered until the end of the backward pass, because the loss needs the output
    projection after the decoder has returned.

    Raises:
        ConfigError: layers are to be compiled for a CPU without a compiler, or ranks cannot share
            the tokens of this architecture.
    """
    decoder.recomputes_layers = config.recompute_layers
    decoder.share_tokens(ranks.context_group)
    if config.compile:
        if next(decoder.parameters()).device.type == "cpu":
            _require_compiler()
        for layer in decoder.layers:
            if isinstance(mlp := getattr(layer, "mlp", None), nn.Module):
                mlp.compile(dynamic=True)
    if ranks.size == 1 or decoder.is_sharded:
        return
    _require_no_tensor_ranks(ranks)
    options = _fsdp_options(decoder, config, ranks)
    for layer in decoder.layers:
        fully_shard(layer, **options)
    fully_shard(decoder, reshard_after_forward=False, **options)


def _require_no_tensor_ranks(ranks: Ranks) -> None:
    layout = ranks.layout
    if layout.tensor > 1 or layout.expert > 1:
        # The tiny decoder is dense: transformers divides its tensors, but has no experts to divide.
        backend = "model.backend=transformers runs any architecture"
        hint = "trainer.parallel.expert=1" if layout.expert > 1 else backend
        raise ConfigError(
            f"trainer.parallel: tensor = {layout.tensor} and expert = {layout.expert}, but the "
            "tiny decoder has neither plans for them nor experts",
            hints=[hint, "trainer.parallel.shard=auto"],
        )


def shard_head(head: nn.Linear, config: TrainerConfig, ranks: Ranks) -> None:
    """Shard a head that is applied to hidden states."""
    if ranks.size > 1:
        fully_shard(head, **_fsdp_options(head, config, ranks))


def reducing_once(
    passes: Iterable[_Pass], config: TrainerConfig, *modules: nn.Module | None
) -> Iterator[_Pass]:
    """Yield the passes of one update, so that only the last backward pass reduces gradients.

    With `trainer.parallel.reduce` "microbatch", every backward pass reduces them over shards, and
    the last one over replicas; "auto" chooses this for models whose whole gradients are large.
    """
    trained = (p for module in modules if module is not None for p in module.parameters())
    num_bytes = sum(4 * p.numel() for p in trained if p.requires_grad) // config.parallel.tensor
    reduces_once = config.parallel.reduce == "update" or (
        config.parallel.reduce == "auto" and num_bytes <= _WHOLE_GRADIENTS_BYTES
    )
    parts = [part for module in modules if module is not None for part in module.modules()]
    if not reduces_once:
        # Of the weights outside of layers, torch reduces some before others, and cannot keep a
        # replica's sums for later.
        layers = (part.layers for part in parts if isinstance(part, PolicyModel))
        parts = [part for modules_of in layers for part in modules_of.modules()]
    sharded = [part for part in parts if isinstance(part, FSDPModule)]
    rest = iter(passes)
    following: _Pass | None = next(rest, None)
    while (current := following) is not None:
        following = next(rest, None)
        is_last = following is None
        for part in sharded:
            part.set_requires_all_reduce(is_last, recurse=False)
            if reduces_once:
                part.set_requires_gradient_sync(is_last, recurse=False)
                part.set_is_last_backward(is_last)
        yield current


def drop_gathered(*modules: nn.Module | None) -> None:
    """Free the weights that a forward pass without a backward pass left gathered.

    Otherwise the next forward pass would use these weights, which may be outdated.
    """
    for module in modules:
        for part in () if module is None else module.modules():
            if isinstance(part, FSDPModule):
                # Modules that stay gathered for the backward pass would ignore `reshard`.
                groups = part._get_fsdp_state()._fsdp_param_groups
                if all(group.is_sharded for group in groups):
                    continue
                is_kept = any(not group._reshard_after_forward for group in groups)
                part.set_reshard_after_forward(True, recurse=False)
                part.reshard()
                part.set_reshard_after_forward(not is_kept, recurse=False)


def autocast(device: torch.device, config: TrainerConfig) -> AbstractContextManager[Any]:
    """Return a context in which torch computes in the type of the settings."""
    if config.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def full(tensor: Tensor) -> Tensor:
    """Return a whole weight; every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the mesh and layout in which they are sharded; those of experts differ."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(layout, []).append(tensor)
    return list(groups.values())


def clip_gradients(parameters: Sequence[Tensor], max_norm: float, ranks: Ranks = ALONE) -> float:
    """Scale gradients in place to a norm of at most `max_norm`; return their norm before.

    Gradients of parameters that every rank has whole (adapters of a sharded model) are averaged
    first, as FSDP2 does with those that it shards.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if ranks.size > 1:
        for gradient in gradients:
            if not isinstance(gradient, DTensor):
                torch.distributed.all_reduce(gradient)
                gradient /= ranks.size
    groups = by_mesh(gradients)
    if len(groups) == 1:
        return float(full(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))
    # torch's function takes gradients of one mesh only.
    norm = math.hypot(*(float(full(torch.nn.utils.get_total_norm(group))) for group in groups))
    for gradient in gradients:
        gradient *= min(1.0, max_norm / (norm + 1e-6))
    return norm


def _fsdp_options(module: nn.Module, config: TrainerConfig, ranks: Ranks) -> dict[str, Any]:
    device = next(module.parameters()).device.type
    offload = OffloadPolicy()
    if config.cpu_offload and is_accelerator(device):
        offload = CPUOffloadPolicy()
    precision = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "mesh": ranks.fsdp_mesh,
        "mp_policy": precision,
        "offload_policy": offload,
    }
