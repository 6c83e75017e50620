"""Devices by `torch.accelerator`: no other module knows a vendor's device by name.

"cuda" is NVIDIA's and AMD's (ROCm), "xpu" Intel's, "npu" Huawei's (Ascend, with torch_npu), "mps"
Apple's. What a device lacks is None, an empty set or False here, never an error.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from areal_gym.errors import ConfigError
from areal_gym.utils.markup import counted

ACCELERATOR = "accelerator"
"""Stands for whatever accelerator there is; without one, an error."""
_VENDOR_PACKAGES = ("torch_npu",)
"""Packages that add a device to torch when they are imported."""
_MAX_SNAPSHOT_EVENTS = 200_000


@functools.cache
def _load_vendor_packages() -> None:
    for name in _VENDOR_PACKAGES:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def accelerator() -> str | None:
    """Return the type of this machine's accelerator, such as "cuda"; None without one."""
    _load_vendor_packages()
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def device_count() -> int:
    """Return the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if accelerator() else 0


def pick_device(name: str, setting: str = "device") -> torch.device:
    """Return the named device; "auto" is the accelerator if there is one, otherwise the CPU.

    Raises:
        ConfigError: there is no such device; the message names `setting`.
    """
    kind = accelerator()
    if name == "auto":
        return torch.device(kind or "cpu")
    if name == ACCELERATOR and kind is not None:
        return torch.device(kind)
    with suppress(RuntimeError):  # torch does not know the name
        device = torch.device(name)
        if device.type == "cpu":
            return torch.device("cpu")
        if device.type == kind and (device.index or 0) < device_count():
            return device
    shown = "cpu" if kind is None else f"cpu, {kind} ({counted(device_count(), 'device')})"
    raise ConfigError(
        f"{setting} = {name!r}: there is no such device here",
        hints=[
            f"available: {shown}",
            f"{setting}=auto takes the accelerator if there is one, otherwise the CPU",
        ],
    )


def is_accelerator(device: torch.device | str) -> bool:
    """Return whether a device is not the CPU."""
    return torch.device(device).type != "cpu"


def collectives_of(kind: str) -> str | None:
    """Return the backend of collectives between devices of a type: nccl, xccl, hccl, gloo, ..."""
    return torch.distributed.Backend.default_device_backend_map.get(kind)


def servers_of(kind: str) -> str | None:
    """Return the servers whose own documentation names devices of a type."""
    return "SGLang and vLLM" if kind in ("cpu", "cuda", "xpu", "npu") else None


def build_of(kind: str) -> str:
    """Return what torch was built with for devices of a type."""
    if kind != "cuda":
        return f"torch {torch.__version__}"
    rocm = torch.version.hip
    return f"ROCm {rocm}" if rocm else f"CUDA {torch.version.cuda}"


def process_group_backend(device: torch.device | str, *, offloads: bool = False) -> str:
    """Return the backend of collectives between such devices (`collectives_of`).

    With weights in the host's memory (`offloads`), the host's part goes by gloo.

    Raises:
        ConfigError: torch knows none for the device.
    """
    kind = torch.device(device).type
    backend = collectives_of(kind)
    if backend is None:
        raise ConfigError(
            f"torch {torch.__version__} has no collectives for the device {kind!r}",
            hints=["trainer.num_ranks=1", "or trainer.device=cpu"],
        )
    return f"cpu:gloo,{kind}:{backend}" if offloads and kind != "cpu" else backend


def use_device_of_rank(rank: int) -> int:
    """Make the rank's accelerator this process's current one, and return its number."""
    index = rank % device_count()
    torch.accelerator.set_device_index(index)
    return index


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a device, or its type."""
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


def memory_bytes(device: torch.device) -> int | None:
    """Return the whole memory of a device."""
    with suppress(Exception):  # a driver may not tell
        get_info = getattr(torch.get_device_module(device), "mem_get_info", None)
        return None if get_info is None else int(get_info(device)[1])
    return None


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure the peak memory of an accelerator."""
    reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if is_accelerator(device) and reset is not None:
        reset(device)


def peak_memory(device: torch.device) -> tuple[int, int] | None:
    """Return the peak of allocated and the reserved bytes; None where torch does not count."""
    module = torch.get_device_module(device)
    if not is_accelerator(device) or not hasattr(module, "max_memory_allocated"):
        return None
    return module.max_memory_allocated(device), module.memory_reserved(device)


def has_fused_adamw(device: torch.device) -> bool:
    """Return whether torch has AdamW in one kernel for the device."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device computes in bfloat16."""
    with suppress(RuntimeError, TypeError, NotImplementedError):
        one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
        return float((one @ one).item()) == 1.0
    return False


def has_varlen_attention(device: torch.device) -> bool:
    """Return whether torch's variable-length attention runs on the device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def device_uuid(device: torch.device) -> str:
    """Return the id of an accelerator, which every process gives it; numbers differ."""
    return str(torch.get_device_module(device).get_device_properties(device).uuid)


def own_gpu() -> str | None:
    """Return the name of this process' current GPU, as `visible_gpu` has it; None without one."""
    if accelerator() != "cuda":
        return None
    return visible_gpu(os.environ, torch.accelerator.current_device_index())


def visible_gpu(environment: Mapping[str, str], index: int) -> str | None:
    """Return how the driver names the GPU that a process with this environment gives a number.

    Equal names are one GPU of a machine. None where other variables than CUDA's choose GPUs.
    """
    if environment.keys() & {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(index)] if visible is None else [name.strip() for name in visible.split(",")]
    place = 0 if visible is None else index
    order = environment.get("CUDA_DEVICE_ORDER", "")
    return f"{order}:{names[place]}" if place < len(names) and names[place] else None


def finish_work(device: torch.device) -> None:
    """Wait until an accelerator has finished the work that this thread has started."""
    if is_accelerator(device):
        torch.accelerator.current_stream(device).synchronize()


def release_shared_memory(device: torch.device) -> None:
    """Free the accelerator's memory that other processes had opened and have closed."""
    collect = getattr(torch.get_device_module(device), "ipc_collect", None)
    if is_accelerator(device) and collect is not None:
        collect()


def profiler_activities(device: torch.device) -> set[torch.profiler.ProfilerActivity]:
    """Return what torch's profiler can watch: the host, and the accelerator."""
    kinds = torch.profiler.ProfilerActivity
    custom = torch._C._get_privateuse1_backend_name()
    wanted = {"CPU", "PrivateUse1" if device.type == custom else device.type.upper()}
    there = torch.profiler.supported_activities()
    return {getattr(kinds, name) for name in wanted if getattr(kinds, name, None) in there}


class MemoryHistory:
    """Records the allocations of an accelerator, for pytorch.org/memory_viz."""

    def __init__(self, device: torch.device) -> None:
        module: Any = getattr(torch.get_device_module(device), "memory", None)
        has_history = hasattr(module, "_record_memory_history")
        self._module = module if has_history and is_accelerator(device) else None

    @property
    def is_recorded(self) -> bool:
        """Whether the device has such a record."""
        return self._module is not None

    def begin(self) -> None:
        """Begin to record."""
        if self._module is not None:
            self._module._record_memory_history(max_entries=_MAX_SNAPSHOT_EVENTS)

    def end(self, file: Path | None) -> None:
        """Write the record into a file, if one is given, and stop."""
        if self._module is not None:
            try:
                if file is not None:
                    self._module._dump_snapshot(str(file))
            finally:
                self._module._record_memory_history(enabled=None)
