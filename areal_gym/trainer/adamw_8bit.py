"""AdamW whose moments take 8 bits per weight, by torchao (Dettmers et al. 2021, 2110.02861).

A moment is kept as one code per element and one scale per block of up to 256 elements. torchao cuts
blocks from a rank's shard without regard to its rows. Here a block never crosses a row, so codes
and scales are sharded tensors like the weight, and any number of ranks can read a checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from areal_gym.errors import ConfigError, TrainError

_MIN_ELEMENTS = 4096
"""Smaller weights keep their moments in float32, as in torchao and bitsandbytes."""
_MAX_BLOCK, _MIN_BLOCK = 256, 32
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def adamw_8bit(
    groups: Iterable[Mapping[str, Any]], *, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Return an 8-bit AdamW optimizer of these parameter groups.

    Raises:
        ConfigError: torchao is not installed.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torchao warns of each of its kernels for other machines
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"trainer.optimizer = 'adamw_8bit' needs torchao: {error}",
            hints=["pip install 'areal-gym[8bit]'", "or trainer.optimizer=adamw"],
        ) from None
    finally:
        logging.disable(level)

    class RowwiseAdamW8bit(AdamW8bit):  # type: ignore[misc]
        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            block = block_size(p)
            return torch.zeros_like(p) if block is None else empty_moment(p, signed, block)

        def step(self, closure: Any = None) -> Any:
            with _eager_on_cpu(self.param_groups[0]["params"][0]):
                return super().step(closure)

    optimizer: torch.optim.Optimizer = RowwiseAdamW8bit(
        [dict(group) for group in groups], betas=betas, weight_decay=weight_decay
    )
    return optimizer


def block_size(parameter: Tensor) -> int | None:
    """Return how many elements of a row share a scale; None if the moments stay in float32."""
    if parameter.ndim < 2 or parameter.numel() < _MIN_ELEMENTS:
        return None
    block = math.gcd(_shard_of(parameter).shape[-1], _MAX_BLOCK)
    return block if block >= _MIN_BLOCK else None


def empty_moment(parameter: Tensor, signed: bool, block: int) -> Tensor:
    """Return a moment of zeros, sharded like its parameter."""
    from torchao.optim.subclass_8bit import OptimState8bit

    shard = _shard_of(parameter).detach()
    if not shard.numel():  # the last ranks have no part of a small weight
        return torch.zeros_like(parameter)
    moment = OptimState8bit.zeros(shard.shape, signed, block, shard.device, dtype=shard.dtype)
    return _like(parameter, moment, parameter.shape)


def stored(parameter: Tensor, state: str, moment: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a moment as a checkpoint has them, by the suffixes of their names."""
    if state not in _SIGNED or (block := _block_of(parameter, moment)) is None:
        return {state: moment}
    *rows, columns = parameter.shape
    shard = _shard_of(moment)
    codes = shard.codes if hasattr(shard, "codes") else shard.to(torch.uint8)
    scales = shard.scale if hasattr(shard, "scale") else shard
    *local_rows, local_columns = shard.shape
    scales = scales.view(*local_rows, local_columns // block)
    return {
        f"{state}.codes": _like(parameter, codes, parameter.shape),
        f"{state}.scale": _like(parameter, scales, torch.Size((*rows, columns // block))),
    }


def allocate_moments(
    parameter: Tensor, saved: Mapping[str, TensorStorageMetadata], states: dict[str, Tensor]
) -> None:
    """Allocate in `states` the moments that were saved, whose values are read later.

    `saved` has their shapes by the suffixes of their names.

    Raises:
        TrainError: the saved blocks do not fit this rank's shard.
    """
    for state, signed in _SIGNED.items():
        if f"{state}.codes" not in saved:
            continue
        columns = parameter.shape[-1]
        block = columns // saved[f"{state}.scale"].size[-1]
        if _shard_of(parameter).shape[-1] % block:
            raise TrainError(
                f"moments were saved in blocks of {block} elements, and a rank's rows have "
                f"{_shard_of(parameter).shape[-1]}: resume with as many tensor-parallel ranks as "
                "before"
            )
        states[state] = empty_moment(parameter, signed, block)


def _block_of(parameter: Tensor, moment: Tensor) -> int | None:
    """Return the size of a moment's blocks; None if it is in float32."""
    shard = _shard_of(moment)
    if hasattr(shard, "block_size"):
        block: int = shard.block_size
        return block
    # A rank with an empty shard names the same tensors as the others.
    return block_size(parameter) if not shard.numel() else None


def _shard_of(tensor: Tensor) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, shard: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of this shape that is sharded like the parameter, from this rank's shard."""
    if not isinstance(parameter, DTensor):
        return shard
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=whole.stride(),
    )


def _eager_on_cpu(parameter: Tensor) -> AbstractContextManager[Any]:
    """Compile torchao's update on accelerators only; on a CPU, each shape would take seconds."""
    if parameter.device.type != "cpu":
        return nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager
