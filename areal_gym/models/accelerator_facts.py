"""Facts about this machine's accelerator, and what it lacks for areal-gym."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from areal_gym.models.device import (
    MemoryHistory,
    accelerator,
    build_of,
    collectives_of,
    device_count,
    device_name,
    has_bfloat16,
    has_fused_adamw,
    has_varlen_attention,
    memory_bytes,
    peak_memory,
    servers_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceleratorFacts:
    """An accelerator as torch sees it."""

    kind: str
    """torch's name of its type."""
    build: str
    """What torch was built with for it, such as "CUDA 13.0" or "ROCm 6.4"."""
    devices: tuple[str, ...]
    """The name and the memory of each device."""
    collectives: str | None
    """The backend of process groups; "gloo" goes through the host's memory."""
    has_bfloat16: bool
    has_fused_adamw: bool
    has_varlen_attention: bool
    counts_memory: bool
    has_memory_history: bool
    servers: str | None

    def lacks(self) -> list[str]:
        """Return what it lacks and what that means, the most important first."""
        missing = {
            "collectives between devices (trainer.num_ranks=1 only)": self.collectives is None,
            "collectives of its own (gloo copies through the host)": self.collectives == "gloo",
            "bfloat16 (leave trainer.dtype=float32)": not self.has_bfloat16,
            "servers (engine.id=embedded samples)": self.servers is None,
            "variable-length attention (slower, in rectangles)": not self.has_varlen_attention,
            "fused AdamW (slower updates)": not self.has_fused_adamw,
            "counts of memory (no memory/gpu_* metrics)": not self.counts_memory,
            "a record of allocations (profiles are traces only)": not self.has_memory_history,
        }
        return [what for what, is_missing in missing.items() if is_missing]


def accelerator_facts() -> AcceleratorFacts | None:
    """Return the facts of this machine's accelerators; None without one."""
    kind = accelerator()
    if kind is None:
        return None
    devices = [torch.device(kind, index) for index in range(device_count())]
    first = devices[0]
    return AcceleratorFacts(
        kind=kind,
        build=build_of(kind),
        devices=tuple(_described(device) for device in devices),
        collectives=collectives_of(kind),
        has_bfloat16=has_bfloat16(first),
        has_fused_adamw=has_fused_adamw(first),
        has_varlen_attention=has_varlen_attention(first),
        counts_memory=peak_memory(first) is not None,
        has_memory_history=MemoryHistory(first).is_recorded,
        servers=servers_of(kind),
    )


def _described(device: torch.device) -> str:
    size = memory_bytes(device)
    return device_name(device) + ("" if size is None else f", {size / 2**30:.0f} GB")
