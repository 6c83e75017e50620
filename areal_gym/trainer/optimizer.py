"""The optimizer of a trainer: AdamW, AdamW with 8-bit moments, or Muon on the matrices."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, did_you_mean
from areal_gym.models.device import has_fused_adamw
from areal_gym.trainer.adamw_8bit import adamw_8bit, allocate_moments, stored
from areal_gym.trainer.cpu_muon import CpuMuon
from areal_gym.trainer.parallel.fsdp import by_mesh, clip_gradients
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks


class Optimizer:
    """Wraps one or two torch optimizers; `step` clips, applies and clears the gradients."""

    def __init__(self, module: nn.Module, config: TrainerConfig, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._max_grad_norm = config.max_grad_norm
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._parameters = list(trained.values())
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
        matrices: dict[str, Tensor] = {}
        rest: dict[str, Tensor] = {}
        for name, p in trained.items():
            has_muon = config.optimizer == "muon" and p.ndim == 2 and ".layers." in name
            (matrices if has_muon else rest)[name] = p
        own_rates = _own_rates(list(trained), config.lr_groups)
        groups = _groups(rest, own_rates, config.lr)
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        if config.optimizer == "adamw_8bit":
            self._optimizers["adamw_8bit"] = adamw_8bit(
                groups, betas=config.betas, weight_decay=config.weight_decay
            )
        else:
            self._optimizers["adamw"] = torch.optim.AdamW(
                groups,
                betas=config.betas,
                weight_decay=config.weight_decay,
                fused=all(has_fused_adamw(p.device) for p in rest.values()),
            )
        if matrices:
            are_on_cpu = all(p.device.type == "cpu" for p in matrices.values())
            muon = CpuMuon if are_on_cpu else torch.optim.Muon
            self._optimizers["muon"] = muon(
                _groups(matrices, own_rates, config.muon_lr), weight_decay=config.weight_decay
            )

    def step(self, scale: float = 1.0, *, is_usable: bool = True) -> float:
        """Apply the gradients with learning rates times `scale`; return the gradient's norm.

        If the norm is not finite or the gradients are not usable, they are only cleared. Muon does
        not step on gradients of zero: the momentum alone would make it a whole step.
        """
        norm = clip_gradients(self._parameters, self._max_grad_norm, self._ranks)
        for kind, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                rate = group["initial_lr"] * scale
                if isinstance(group["lr"], Tensor):  # compiled code reads this tensor
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            has_gradient = norm > 0 or kind != "muon"
            if is_usable and math.isfinite(norm) and has_gradient:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers."""
        return list(self._optimizers.values())

    def to(self, device: torch.device) -> None:
        """Move the states to a device; the parameters are not moved."""
        for optimizer in self._optimizers.values():
            for tensors in optimizer.state.values():
                for name, tensor in tensors.items():
                    tensors[name] = tensor.to(device)

    def states(self) -> dict[str, Tensor]:
        """Return the live states, named like `adamw.PARAMETER.exp_avg`."""
        return {
            f"{kind}.{self._names[parameter]}.{part}": tensor
            for kind, optimizer in self._optimizers.items()
            for parameter, moments in optimizer.state.items()
            for state, moment in moments.items()
            for part, tensor in stored(parameter, state, moment).items()
        }

    def allocate(self, saved: Mapping[str, TensorStorageMetadata]) -> None:
        """Allocate saved states, so that `states` returns them; their values are arbitrary.

        States of other parameters, or of another optimizer, are skipped.
        """
        owners = {
            f"{kind}.{self._names[parameter]}": (optimizer, parameter)
            for kind, optimizer in self._optimizers.items()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        by_owner: dict[str, dict[str, TensorStorageMetadata]] = {}
        for name, meta in saved.items():
            owner, _, part = name.rpartition(".")
            if owner not in owners:  # the name of a moment's part has one dot more
                owner, _, moment = owner.rpartition(".")
                part = f"{moment}.{part}"
            if owner in owners:
                by_owner.setdefault(owner, {})[part] = meta
        for owner, parts in by_owner.items():
            optimizer, parameter = owners[owner]
            states = optimizer.state[parameter]
            for part, meta in parts.items():
                if "." not in part:
                    states[part] = _empty(meta, parameter.detach())
            allocate_moments(parameter, parts, states)


def _own_rates(names: Sequence[str], lr_groups: Mapping[str, float]) -> dict[str, float]:
    """Return the learning rates that `trainer.lr_groups` gives to parameters, by name.

    Raises:
        ConfigError: a pattern fits no name.
    """
    rates: dict[str, float] = {}
    for pattern, rate in lr_groups.items():
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            patterns = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
            raise ConfigError(
                f"trainer.lr_groups has {pattern!r}, which fits no parameter that is trained",
                hints=[
                    did_you_mean(pattern, patterns),
                    f"parameters: {', '.join(patterns[:40])}" + (", ..." if patterns[40:] else ""),
                ],
            )
        for name in fitting:
            rates.setdefault(name, rate)
    return rates


def _groups(
    parameters: Mapping[str, Tensor], own_rates: Mapping[str, float], lr: float
) -> list[dict[str, Any]]:
    """Return parameter groups, each of one mesh and one learning rate."""
    by_rate: dict[float, list[Tensor]] = {}
    for name, parameter in parameters.items():
        by_rate.setdefault(own_rates.get(name, lr), []).append(parameter)
    return [
        {"params": group, "lr": rate, "initial_lr": rate}
        for rate, members in by_rate.items()
        for group in by_mesh(members)
    ]


def _empty(meta: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    """Return an empty tensor that is sharded like the parameter, or a scalar."""
    dtype = meta.properties.dtype
    if meta.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(meta.size, dtype=dtype, device=parameter.device)
