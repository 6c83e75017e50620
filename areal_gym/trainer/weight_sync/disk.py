"""Publishes weights over a file system that trainer and servers share."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import torch

from areal_gym.engines.base import Engine
from areal_gym.models.tiny.checkpoint_files import write_weights
from areal_gym.trainer.base import Weights
from areal_gym.trainer.weight_sync.base import on_all, require_remote
from areal_gym.utils.files import readable_disk_errors


class DiskWeightSync:
    """Writes one directory per version atomically; servers load it, older versions are deleted.

    The files are written before generation is interrupted. The newest version is kept, so that a
    restarted server can load the weights of the others. Servers read the same path `directory`;
    `dtype` is the type of the files ("bfloat16" halves them), that of the weights by default.
    """

    def __init__(self, engine: Engine, *, directory: Path, dtype: str | None = None) -> None:
        self._engine = require_remote(engine, "disk")
        self._directory = directory
        self._dtype = None if dtype is None else getattr(torch, dtype)

    async def publish(self, weights: Weights, version: int) -> None:
        """Write the files, interrupt generation, load them everywhere, resume.

        Raises:
            TrainError: the disk is full or not writable.
            EngineError: no server took the weights.
        """
        path = await asyncio.to_thread(self._write, weights, version)
        async with self._engine.updating(version) as servers:
            await on_all(servers, lambda server: server.load_from_disk(path, version))
        await asyncio.to_thread(self._delete_all_but, path)

    async def aclose(self) -> None:
        """Delete the published files; checkpoints are separate."""
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _write(self, weights: Weights, version: int) -> Path:
        path = self._directory / f"version-{version:06d}"
        draft = path.with_name(f".{path.name}.tmp")
        with readable_disk_errors(self._directory):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            write_weights(weights, draft, dtype=self._dtype)
            shutil.rmtree(path, ignore_errors=True)
            draft.rename(path)
        return path

    def _delete_all_but(self, path: Path) -> None:
        for other in self._directory.iterdir():
            if other != path:
                shutil.rmtree(other, ignore_errors=True)
