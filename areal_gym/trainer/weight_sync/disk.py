"""Weights over a file system that trainer and servers share."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from areal_gym.engines.base import Engine
from areal_gym.trainer.weight_sync.base import Weights, on_all, require_remote
from areal_gym.utils.files import readable_disk_errors


class DiskWeightSync:
    """One directory per version, which appears whole; servers load it, the one before it goes.

    The files are written before generation is interrupted. The newest version stays, so that a
    server which was started again can be given the weights of the others.

    Args:
        engine: has servers.
        directory: where versions are written; servers read the same path.
        dtype: of the files ("bfloat16" halves them); as the weights are by default.
    """

    def __init__(self, engine: Engine, *, directory: Path, dtype: str | None = None) -> None:
        self._engine = require_remote(engine, "disk")
        self._directory = directory
        self._dtype = None if dtype is None else getattr(torch, dtype)

    async def publish(self, weights: Weights, version: int) -> None:
        """Write, interrupt, load everywhere, go on.

        Raises:
            TrainError: the disk is full or not writable.
            EngineError: no server took the weights.
        """
        path = await asyncio.to_thread(self._write, weights, version)
        async with self._engine.updating(version) as servers:
            await on_all(servers, lambda server: server.load_from_disk(path, version))
        await asyncio.to_thread(self._forget_all_but, path)

    async def aclose(self) -> None:
        """Delete what was published; checkpoints are somebody else's."""
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _write(self, weights: Weights, version: int) -> Path:
        path = self._directory / f"version-{version:06d}"
        draft = path.with_name(f".{path.name}.tmp")
        # A contiguous copy of its own for each: safetensors refuses tensors that share memory.
        tensors = {name: tensor.to("cpu", self._dtype, copy=True) for name, tensor in weights}
        with readable_disk_errors(self._directory):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            file = draft / "model.safetensors"
            save_file({n: t.contiguous() for n, t in tensors.items()}, file, {"format": "pt"})
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
            shutil.rmtree(path, ignore_errors=True)
            draft.rename(path)
        return path

    def _forget_all_but(self, path: Path) -> None:
        for other in self._directory.iterdir():
            if other != path:
                shutil.rmtree(other, ignore_errors=True)
