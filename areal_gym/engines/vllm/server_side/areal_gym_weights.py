"""Loads weights in the workers of a vLLM server: from files, or from a broadcast.

    PYTHONPATH=.../areal_gym/engines/vllm/server_side vllm serve MODEL \
        --worker-extension-cls areal_gym_weights.WeightLoader \
        --weight-transfer-config '{"backend": "areal-gym"}'

vLLM imports this module in every worker before it makes the weight transfer engine, so the backend
is registered by then. Three ways in:

* `POST /collective_rpc {"method": "load_weights_from", "kwargs": {"directory": DIRECTORY}}`;
* the session `/start_weight_update`, `/update_weights {"update_info": {"directory": DIRECTORY}}`,
  `/finish_weight_update`;
* the same session with the fields of vLLM's "nccl" backend, and a broadcast of one flat buffer for
  each `/update_weights`: NCCL between GPUs, gloo between CPUs.

vLLM's own `reload_weights` takes the model apart before it looks at the files, and forgets to pack
a tied output matrix again on a CPU. Here names and shapes are compared first, so that a refusal
changes nothing.
"""

from __future__ import annotations

import datetime
import json
import math
import struct
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "areal-gym"


class OtherModelError(ValueError):
    """The weights are not those of the served model."""


def files_in(directory: str | Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, without copies of them in another layout."""
    files = sorted(Path(directory).glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")]


def shapes_in(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a directory's safetensors files, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files_in(directory):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        shapes |= {name: tuple(tensor["shape"]) for name, tensor in header.items()}
    return shapes


def tensors_in(directory: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a directory's safetensors files."""
    from safetensors import safe_open

    for file in files_in(directory):
        with safe_open(str(file), "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                yield name, tensors.get_tensor(name)


def missing_from(names: Set[str], served: Set[str]) -> list[str]:
    """Return the served model's tensors that are not among `names`, and should be.

    Some checkpoints also hold what a model computes: a tied output matrix, rotary frequencies.
    """
    computed = ("lm_head.weight", ".inv_freq")
    return sorted(name for name in served - names if not name.endswith(computed))


def require_same_model(
    new: dict[str, tuple[int, ...]], served: dict[str, tuple[int, ...]], *, is_whole: bool
) -> None:
    """Compare names and shapes with those that the server was started with.

    A model without safetensors files (random weights) cannot be compared.

    Raises:
        OtherModelError: names the first tensor that differs.
    """
    if not served:
        return
    names = {*new, *missing_from(new.keys(), served.keys())} if is_whole else new.keys()
    odd = sorted(name for name in names if served.get(name) != new.get(name))
    if odd:
        mine, theirs = served.get(odd[0], "missing"), new.get(odd[0], "missing")
        raise OtherModelError(
            f"{len(odd)} tensors are not those of the served model, first {odd[0]}: {theirs} "
            f"instead of {mine}"
        )


def pack_tied_head(model: Any) -> None:
    """Pack a tied output matrix again: on a CPU, vLLM 0.32 packs what was loaded only."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)


class WeightLoader:
    """Methods that each worker of the server gets (`--worker-extension-cls`)."""

    def load_weights_from(self: Any, directory: str) -> dict[str, Any]:
        """Load a checkpoint; return the number of tensors, or why the weights were left alone."""
        try:
            new = shapes_in(directory)
            if not new:
                raise OtherModelError(f"no *.safetensors in {directory}")
            require_same_model(new, shapes_in(self.model_config.model), is_whole=True)
        except (OSError, ValueError, struct.error) as error:
            return {"refused": str(error)}
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(tensors_in(directory))
            finalize_layerwise_reload(model, self.model_config)
            pack_tied_head(model)
        return {"num_tensors": len(new)}

    def describe_weight_loader(self: Any) -> dict[str, Any]:
        """Return what a client must know of the worker, and of its model."""
        config = self.vllm_config.weight_transfer_config
        return {
            "device": self.device.type,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "backend": getattr(config, "backend", None),
            "vocab_size": self.model_config.get_vocab_size(),
        }


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The fields of vLLM's "nccl" backend, the group's name and torch's backend ("": the device's).

    A session that loads files needs no group, and leaves all fields out.
    """

    master_address: str | None = None
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 0
    group_name: str = "areal-gym"
    group_backend: str = ""
    timeout_s: float = 120.0


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A directory, or what the next flat buffer holds."""

    directory: str | None = None
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class ArealGymTransfer(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's session, with files or broadcasts of flat buffers.

    The model is taken apart by the first weights that fit, so that a refusal before changes
    nothing. A session that ends after that without all weights leaves the server unusable.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    group: Any = None
    is_open = False
    names: frozenset[str] = frozenset()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group, in place of an earlier one."""
        self.shutdown()
        if init_info.master_address is not None:
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self.group = join_group(init_info, rank + init_info.rank_offset)

    def start_weight_update(self) -> None:
        """Wait for the first weights."""
        self.is_open, self.names = False, frozenset()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights. The base class would synchronize an accelerator, and there may be none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the tensors of files, or of the next broadcast."""
        served = shapes_in(self.model_config.model)
        if update_info.directory is not None:
            new, is_whole = shapes_in(update_info.directory), True
            tensors = tensors_in(update_info.directory)
        else:
            shapes = [tuple(shape) for shape in update_info.shapes]
            new, is_whole = dict(zip(update_info.names, shapes, strict=True)), False
            # The others are in the broadcast already: take part, and refuse what came afterwards.
            tensors = iter(self.receive(update_info))
        if not new:
            raise OtherModelError(f"no *.safetensors in {update_info.directory}")
        require_same_model(new, served, is_whole=is_whole)
        if not self.is_open:
            initialize_layerwise_reload(self.model)
            self.is_open = True
        self.names = self.names.union(new)
        self.model.load_weights(tensors)

    def receive(self, update_info: UpdateInfo) -> list[tuple[str, Any]]:
        """Return the tensors of one broadcast, which is a buffer of bytes."""
        import torch

        if self.group is None:
            raise OtherModelError("no group was joined: POST /init_weight_transfer_engine")
        types = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(update_info.shapes, types, strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        torch.distributed.broadcast(flat, 0, group=self.group)
        parts = zip(update_info.names, flat.split(sizes), types, update_info.shapes, strict=True)
        return [(name, part.view(dtype).reshape(shape)) for name, part, dtype, shape in parts]

    def finish_weight_update(self) -> None:
        """Put the model together again.

        Raises:
            OtherModelError: not all weights have come.
        """
        if not self.is_open:
            return
        self.is_open = False
        missing = missing_from(self.names, shapes_in(self.model_config.model).keys())
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model)
        if missing:
            raise OtherModelError(f"{len(missing)} tensors have not come, first {missing[0]}")

    def shutdown(self) -> None:
        """Leave the group."""
        import torch

        group, self.group = self.group, None
        if group is not None:
            torch.distributed.destroy_process_group(group)


def join_group(info: InitInfo, rank: int) -> Any:
    """Join a group of torch beside those of vLLM, as `areal_gym.models.process_groups` does."""
    import torch
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    timeout = datetime.timedelta(seconds=info.timeout_s)
    place = f"tcp://{info.master_address}:{info.master_port}"
    store, rank, world_size = next(rendezvous(place, rank, info.world_size, timeout=timeout))
    store.set_timeout(timeout)
    device = torch.accelerator.current_accelerator() or "cpu"
    backend = info.group_backend or c10d.get_default_backend_for_device(device)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(info.group_name, store),
        group_name=c10d.GroupName(info.group_name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ArealGymTransfer)
