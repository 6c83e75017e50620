"""GPUs by name, with figures of their vendors' data sheets (dense, without sparsity)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_gym.errors import UsageError, did_you_mean

_PCIE4, _PCIE5 = 32e9, 64e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU has these figures, in bytes and operations per second."""

    device_name: str
    """The name that `torch.accelerator` and CUDA give; a part of a GPU (MIG) has another name."""
    memory: float
    """Bytes."""
    bfloat16_flops: float
    float32_flops: float
    """Outside of tensor cores."""
    memory_bandwidth: float
    link_bandwidth: float
    """To the other GPUs of its node, in one direction: NVLink, Infinity Fabric, or PCI Express."""


GPUS: Mapping[str, Gpu] = {
    "a10-24gb": Gpu("NVIDIA A10", 24e9, 125e12, 31.2e12, 0.6e12, _PCIE4),
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", 40e9, 312e12, 19.5e12, 1.555e12, 300e9),
    "a100-40gb-pcie": Gpu("NVIDIA A100-PCIE-40GB", 40e9, 312e12, 19.5e12, 1.555e12, _PCIE4),
    "a100-80gb": Gpu("NVIDIA A100-SXM4-80GB", 80e9, 312e12, 19.5e12, 2.039e12, 300e9),
    "a100-80gb-pcie": Gpu("NVIDIA A100 80GB PCIe", 80e9, 312e12, 19.5e12, 1.935e12, _PCIE4),
    "l4-24gb": Gpu("NVIDIA L4", 24e9, 121e12, 30.3e12, 0.3e12, _PCIE4),
    "l40s-48gb": Gpu("NVIDIA L40S", 48e9, 362e12, 91.6e12, 0.864e12, _PCIE4),
    "rtx3090-24gb": Gpu("NVIDIA GeForce RTX 3090", 24e9, 71e12, 35.6e12, 0.936e12, _PCIE4),
    "rtx4090-24gb": Gpu("NVIDIA GeForce RTX 4090", 24e9, 165.2e12, 82.6e12, 1.008e12, _PCIE4),
    "gh200-96gb": Gpu("NVIDIA GH200 480GB", 96e9, 989.4e12, 66.9e12, 4e12, 450e9),
    "h100-80gb": Gpu("NVIDIA H100 80GB HBM3", 80e9, 989.4e12, 66.9e12, 3.35e12, 450e9),
    "h100-80gb-pcie": Gpu("NVIDIA H100 PCIe", 80e9, 756e12, 51.2e12, 2e12, _PCIE5),
    "h200-141gb": Gpu("NVIDIA H200", 141e9, 989.4e12, 66.9e12, 4.8e12, 450e9),
    "b200-180gb": Gpu("NVIDIA B200", 180e9, 2250e12, 80e12, 7.7e12, 900e9),
    "mi300x-192gb": Gpu("AMD Instinct MI300X", 192e9, 1307.4e12, 163.4e12, 5.3e12, 448e9),
}


def gpu_named(name: str) -> Gpu:
    """Return a GPU's figures.

    Raises:
        UsageError: it is not in `GPUS`.
    """
    if name not in GPUS:
        raise UsageError(
            f"no figures for a GPU named {name!r}",
            hints=[did_you_mean(name, GPUS), f"there are: {', '.join(GPUS)}"],
        )
    return GPUS[name]


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the figures of a GPU by the name that its driver gives; None if unknown."""
    return next((gpu for gpu in GPUS.values() if gpu.device_name == device_name), None)
