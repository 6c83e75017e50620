"""The optimizer of a trainer: AdamW, or Muon on the matrices and AdamW on the rest.

Master weights and all states are float32: in bfloat16, updates of usual learning rates vanish.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from areal_gym.config import TrainerConfig
from areal_gym.trainer.parallel.fsdp import full


class Optimizer:
    """One `step()` for whatever is underneath: clips, applies, clears the gradients."""

    def __init__(self, module: nn.Module, config: TrainerConfig) -> None:
        self._max_grad_norm = config.max_grad_norm
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._parameters = list(trained.values())
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
        matrices = []
        if config.optimizer == "muon":
            matrices = [p for name, p in trained.items() if p.ndim == 2 and ".layers." in name]
        is_matrix = {id(p) for p in matrices}
        rest = [p for p in self._parameters if id(p) not in is_matrix]
        fused = all(p.device.type in ("cpu", "cuda") for p in rest)
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(
                rest,
                lr=config.lr,
                betas=config.betas,
                weight_decay=config.weight_decay,
                fused=fused,
            )
        }
        if matrices:
            self._optimizers["muon"] = torch.optim.Muon(
                matrices, lr=config.muon_lr, weight_decay=config.weight_decay
            )
        self._rates = {"adamw": config.lr, "muon": config.muon_lr}

    def step(self, scale: float = 1.0, *, is_usable: bool = True) -> float:
        """Apply the gradients with learning rates times `scale`; returns the gradient's norm.

        When the norm is not finite, or they are not usable, nothing is applied; the gradients are
        cleared all the same.
        """
        norm = float(full(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)))
        for kind, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self._rates[kind] * scale
            if is_usable and math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def states(self) -> dict[str, Tensor]:
        """The live states by name: `adamw.PARAMETER.exp_avg`, `muon.PARAMETER.momentum_buffer`."""
        return {
            f"{kind}.{self._names[parameter]}.{state}": tensor
            for kind, optimizer in self._optimizers.items()
            for parameter, tensors in optimizer.state.items()
            for state, tensor in tensors.items()
        }

    def allocate(self, saved: Mapping[str, TensorStorageMetadata]) -> None:
        """Make room for states that were saved, for `states` to hand out; values are arbitrary.

        What belongs to other parameters, or to another optimizer, is passed over.
        """
        owners = {
            f"{kind}.{self._names[parameter]}": (optimizer, parameter)
            for kind, optimizer in self._optimizers.items()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, found in saved.items():
            owner, _, state = name.rpartition(".")
            if owner in owners:
                optimizer, parameter = owners[owner]
                optimizer.state[parameter][state] = _room(found, parameter.detach())


def _room(found: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    """An empty tensor: like the parameter, sharded as it is, or a number of its own."""
    dtype = found.properties.dtype
    if found.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(found.size, dtype=dtype, device=parameter.device)
