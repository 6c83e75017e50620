"""LoRA through peft: the base weights are frozen, and small matrices beside them are trained."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal_gym.config import LoraConfig
from areal_gym.errors import ConfigError
from areal_gym.models.lora_weights import ADAPTER, is_adapter
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.parallel.fsdp import full

_PEFT = "base_model.model."
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers that choose experts; they are not adapted."""


def add_adapter(model: PolicyModel, settings: LoraConfig, *, seed: int = 0) -> None:
    """Add a float32 adapter to the chosen matrices and freeze everything else.

    Raises:
        ConfigError: `targets` names a matrix that the model does not have, or experts that are
            divided among ranks; or peft is not installed.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "trainer.lora needs peft, which is not installed",
            hints=["pip install 'areal-gym[lora]'"],
        ) from None
    linears, experts = _matrices(model)
    if settings.targets != "all":
        known = {name.rpartition(".")[2] for name in (*linears, *experts)}
        if unknown := sorted(set(settings.targets) - known):
            raise ConfigError(
                f"trainer.lora.targets names {', '.join(unknown)}, which the model does not have",
                hints=[
                    f"it has: {', '.join(sorted(known))}",
                    "to adapt all of them: trainer.lora.targets=all",
                ],
            )
        linears, experts = (
            [name for name in names if name.rpartition(".")[2] in settings.targets]
            for names in (linears, experts)
        )
    if experts and any(_is_divided(model.layers.get_parameter(name)) for name in experts):
        raise ConfigError(
            "trainer.lora adapts the stacked matrices of experts, which trainer.parallel.expert "
            "divides among ranks: an adapter's are whole on every rank",
            hints=[
                "every rank gathers a layer's experts: trainer.parallel.expert=1",
                "adapt attention only: trainer.lora.targets=[q_proj,k_proj,v_proj,o_proj]",
            ],
        )
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=linears or None,
        target_parameters=experts or None,
        lora_dropout=0.0,
        bias="none",
    )
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # every rank, and every start, draws the same weights
        # Injected into the layers, because in a transformers model peft renames targets of experts.
        peft.inject_adapter_in_model(config, model.layers)
    for name, parameter in model.network.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
            parameter.requires_grad = True


def _is_divided(parameter: Tensor) -> bool:
    """Return whether each rank has some of the experts, rather than a shard of every expert."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _matrices(model: PolicyModel) -> tuple[list[str], list[str]]:
    """Return the names in `layers` of linear modules, and of stacked expert matrices."""
    linears, experts = [], []
    for name, module in model.layers.named_modules():
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear):
            # Mamba's fused kernels read this weight directly and would bypass an adapter.
            is_fused = leaf == "out_proj" and hasattr(model.layers.get_submodule(parent), "D")
            if leaf not in _ROUTERS and not is_fused:
                linears.append(name)
        elif not isinstance(module, nn.Conv1d):
            own = module.named_parameters(recurse=False)
            experts += [f"{name}.{leaf}" for leaf, parameter in own if parameter.ndim == 3]
    return linears, experts


def adapter_weights(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield peft's names (`base_model.model.NAME.lora_A.weight`) and tensors; all ranks call this.

    Raises:
        ConfigError: stacked expert matrices are adapted, which servers cannot load.
    """
    if any(hasattr(module, "parameter_name") for module in model.layers.modules()):
        raise ConfigError(
            "the adapter covers stacked matrices of experts, which servers load only when merged",
            hints=[
                "publish merged weights: trainer.weight_sync=disk, tensor or distributed",
                "adapt linear layers only: trainer.lora.targets=[q_proj,k_proj,v_proj,o_proj]",
            ],
        )
    for name, tensor in model.network.state_dict().items():
        if is_adapter(name):
            yield _PEFT + name.replace(f".{ADAPTER}.weight", ".weight"), full(tensor.detach())
