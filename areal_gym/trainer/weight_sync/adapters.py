"""Publishes LoRA adapters as versions; the base model stays on the servers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from areal_gym.engines.base import Engine, WeightServer, adapter_name
from areal_gym.errors import ConfigError
from areal_gym.trainer.base import Weights
from areal_gym.trainer.weight_sync.base import on_all, require_remote
from areal_gym.utils.files import readable_disk_errors, write_atomic

_ABORT_EVERY_S = 0.25
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_A\.weight")


class LoraWeightSync:
    """Publishes each version as an adapter, `policy-v7`, which requests name.

    Servers must have been started for adapters (SGLang: `--enable-lora --max-lora-rank R
    --lora-target-modules ...`). Loading an adapter does not change a server's version, which is set
    separately. A request keeps its adapter, so requests in flight are sent again; those of other
    processes (rollout workers) are sent again when the previous adapter is unloaded.

    Args:
        engine: an engine with servers.
        directory: where adapters are written in peft's layout; servers read the same path.
        alpha: the update of a matrix is alpha / r * B A.
    """

    takes_adapter = True
    """Whether the adapter (`Trainer.adapter`) is published instead of all weights."""

    def __init__(self, engine: Engine, *, directory: Path, alpha: float = 16.0) -> None:
        self._engine = require_remote(engine, "lora")
        self._directory = directory
        self._alpha = alpha
        self._published: list[str] = []

    async def publish(self, weights: Weights, version: int) -> None:
        """Load the adapter on all servers, switch to it, and unload the previous ones.

        Args:
            weights: peft's names (`base_model.model.NAME.lora_A.weight`, `lora_B`) and tensors.
            version: the policy version.

        Raises:
            ConfigError: the weights are not an adapter.
            EngineError: no server took the adapter.
        """
        name = adapter_name(version)
        path = await asyncio.to_thread(self._write, weights, name)
        async with self._engine.updating(version, must_abort=True) as servers:
            # All load it before any reports the version: then other processes name it to any.
            alive = await on_all(servers, lambda server: server.load_adapter(path, version))
            alive = await on_all(alive, lambda server: server.set_version(str(version)))
            self._engine.adapter = name
            old = [published for published in self._published if published != name]
            self._published = [name]
            # Deleted before they are unloaded, else SGLang would load them for a late request.
            await asyncio.to_thread(self._delete, old)
            await asyncio.gather(
                *(_retire(server, old) for server in alive),
                return_exceptions=True,  # a server that came back may not have them
            )

    async def aclose(self) -> None:
        """Delete the published files; checkpoints are separate."""
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            shutil.rmtree(self._directory / name, ignore_errors=True)

    def _write(self, named: Weights, name: str) -> Path:
        path, weights = self._directory / name, dict(named)
        config = adapter_config(weights, alpha=self._alpha)
        tensors = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in weights.items()}
        with readable_disk_errors(self._directory):
            shutil.rmtree(path, ignore_errors=True)
            write_atomic(path / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
            write_atomic(path / "adapter_config.json", json.dumps(config, indent=2))
        return path


async def _retire(server: WeightServer, names: Sequence[str]) -> None:
    """Unload adapters, and abort the requests that still use them, which are then sent again."""

    async def unload() -> None:
        for name in names:
            await server.unload_adapter(name)

    unloading = asyncio.create_task(unload())
    try:
        while True:
            # Once unloading has begun, no new request gets an old adapter, but the server waits for
            # those that have one.
            await server.abort_all()
            await asyncio.wait({unloading}, timeout=_ABORT_EVERY_S)
            if unloading.done():
                return await unloading
    finally:
        unloading.cancel()


def adapter_config(weights: dict[str, Tensor], *, alpha: float) -> dict[str, object]:
    """Return the content of `adapter_config.json` for these weights.

    Raises:
        ConfigError: the weights are not an adapter, or its matrices have different ranks.
    """
    downs = {m[1]: t for n, t in weights.items() if (m := _NAME.fullmatch(n))}
    ranks = {tensor.shape[0] for tensor in downs.values()}
    if len(ranks) != 1:
        problem = f"ranks {sorted(ranks)}" if ranks else f"names like {next(iter(weights), None)!r}"
        raise ConfigError(
            f"trainer.weight_sync=lora publishes one LoRA adapter; these weights have {problem}",
            hints=["whole weights need trainer.weight_sync=disk, tensor or distributed"],
        )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": ranks.pop(),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in downs}),
    }
