"""LoRA through peft: the base weights stay, small matrices beside them are trained.

W' = W + alpha / r * B A; A [r, in] is random and B [out, r] zero at first (Hu et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from areal_gym.config import LoraConfig
from areal_gym.errors import ConfigError
from areal_gym.trainer.parallel.fsdp import full

_NAME = "default"
_DOWN, _UP, _BASE = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight", ".base_layer"
_PEFT = "base_model.model."


def add_adapter(decoder: nn.Module, settings: LoraConfig, *, seed: int = 0) -> None:
    """Put an adapter beside the named matrices; everything else is frozen.

    Raises:
        ConfigError: `targets` names no matrix of the model, or peft is not installed.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "trainer.lora needs peft, which is not installed",
            hints=["pip install 'areal-gym[lora]'"],
        ) from None
    known = {
        name.rpartition(".")[2] for name, m in decoder.named_modules() if isinstance(m, nn.Linear)
    }
    unknown = sorted(set(settings.targets) - known)
    if unknown:
        raise ConfigError(
            f"trainer.lora.targets names {', '.join(unknown)}, which the model does not have",
            hints=[f"it has: {', '.join(sorted(known))}"],
        )
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # every rank, and every start, draws the same
        peft.inject_adapter_in_model(config, decoder)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name belongs to an adapter."""
    return name.endswith((_DOWN, _UP))


def merged_weights(decoder: nn.Module, settings: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face names and weights with the adapter added; every rank must ask for all."""
    state = decoder.state_dict()
    scale = settings.alpha / settings.rank
    for name, tensor in state.items():
        if is_adapter(name):
            continue
        whole = full(tensor.detach())
        module, _, leaf = name.rpartition(".")
        if module.endswith(_BASE):
            module = module.removesuffix(_BASE)
            if leaf == "weight":
                up, down = (full(state[module + suffix].detach()) for suffix in (_UP, _DOWN))
                whole = whole + scale * (up.float() @ down.float()).to(whole.dtype)
        yield f"{module}.{leaf}", whole


def adapter_weights(decoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield peft's names (`base_model.model.NAME.lora_A.weight`) and tensors, on every rank."""
    for name, tensor in decoder.state_dict().items():
        if is_adapter(name):
            yield _PEFT + name.replace(f".{_NAME}.weight", ".weight"), full(tensor.detach())
