"""The optimizer of a learner: AdamW, or Muon on the matrices and AdamW on the rest.

Master weights and all states are float32: in bfloat16, updates of usual learning rates vanish.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from areal_gym.config import TrainerConfig
from areal_gym.trainer.fsdp import full, shard_like

__all__ = ["Optimizer"]


class Optimizer:
    """One `step()` for whatever is underneath: clips, applies, clears the gradients."""

    def __init__(self, module: nn.Module, config: TrainerConfig) -> None:
        self._max_grad_norm = config.max_grad_norm
        self._parameters = list(module.parameters())
        matrices = []
        if config.optimizer == "muon":
            matrices = [
                p for name, p in module.named_parameters() if p.ndim == 2 and ".layers." in name
            ]
        is_matrix = {id(p) for p in matrices}
        rest = [p for p in self._parameters if id(p) not in is_matrix]
        fused = all(p.device.type in ("cpu", "cuda") for p in rest)
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                rest,
                lr=config.lr,
                betas=config.betas,
                weight_decay=config.weight_decay,
                fused=fused,
            )
        ]
        self._rates = [config.lr]
        if matrices:
            self._optimizers.append(
                torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay)
            )
            self._rates.append(config.muon_lr)

    def step(self, scale: float = 1.0) -> float:
        """Apply the gradients with learning rates times `scale`; returns the gradient's norm.

        When the norm is not finite nothing is applied; the gradients are cleared all the same.
        """
        norm = float(full(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)))
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            if math.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps: whole tensors, however many ranks there are."""
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        for state in states:
            state["state"] = {
                index: {name: full(value) for name, value in values.items()}
                for index, values in state["state"].items()
            }
        return states

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue where `state_dict` was taken, by as many ranks or others."""
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)
            for parameter, values in optimizer.state.items():
                values.update({name: shard_like(x, parameter) for name, x in values.items()})
