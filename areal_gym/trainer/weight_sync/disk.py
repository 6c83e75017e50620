"""Publishes weights over a file system that trainer and servers share."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from areal_gym.engines.base import Engine
from areal_gym.errors import TrainError
from areal_gym.trainer.base import Weights
from areal_gym.trainer.weight_sync.base import on_all, require_remote, sent_type
from areal_gym.trainer.weight_sync.rank_tasks import OneAhead, RankSide, run_task
from areal_gym.utils.files import readable_disk_errors, write_atomic


class DiskWeightSync:
    """Writes one directory per version atomically; servers load it, and older ones are deleted.

    The files are written before generation is interrupted. The newest version is kept, so that a
    restarted server can load the others' weights. Servers and ranks see `directory` at the same
    path. The trainer's ranks write at the same time, each its share of the files.

    Args:
        engine: an engine with servers.
        directory: where the files are written.
        dtype: the type of the files ("bfloat16" halves them); by default that of the weights.
        file_mb: the size of a file in 10^6 bytes; a rank holds two files in memory.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        directory: Path,
        dtype: str | None = None,
        file_mb: float = 1000,
    ) -> None:
        self._engine = require_remote(engine, "disk")
        self._directory = directory
        self._dtype = sent_type(dtype)
        self._file_bytes = int(file_mb * 1e6)
        self._kept: dict[str, Any] = {}

    async def publish(self, weights: Weights, version: int) -> None:
        """Write the files, interrupt generation, load them on all servers, resume.

        Raises:
            TrainError: the disk is full or not writable.
            EngineError: no server took the weights.
        """
        path = self._directory / f"version-{version:06d}"
        task = WriteFiles(path.absolute(), self._dtype, self._file_bytes)
        await asyncio.to_thread(run_task, weights, task, self._kept)
        async with self._engine.updating(version) as servers:
            await on_all(servers, lambda server: server.load_from_disk(path, version))
        await asyncio.to_thread(self._delete_all_but, path)

    async def aclose(self) -> None:
        """Delete the published files; checkpoints are separate."""
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _delete_all_but(self, path: Path) -> None:
        for other in self._directory.iterdir():
            if other != path:
                shutil.rmtree(other, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class WriteFiles:
    """The rank task that writes safetensors files and their index; `path` appears only complete.

    Raises:
        TrainError: a rank's disk is full or not writable.
    """

    path: Path
    dtype: torch.dtype | None
    max_bytes: int

    def __call__(self, side: RankSide) -> None:
        """Gather the weights in every rank; the ranks take turns in writing files."""
        draft, is_first = self.path.with_name(f".{self.path.name}.tmp"), side.ranks.rank == 0
        if is_first:
            side.agree(self._try(self._begin, draft))
        else:
            side.agree(None)
        writing = OneAhead()
        files: list[list[str]] = [[]]
        held: dict[str, Tensor] = {}
        size = num_bytes = 0
        for name, tensor in side.weights(self.dtype):
            if files[-1] and size + tensor.nbytes > self.max_bytes:
                writing.run(_write, draft / _draft_name(len(files)), held)
                files.append([])
                held, size = {}, 0
            if (len(files) - 1) % side.ranks.size == side.ranks.rank and writing.error is None:
                tensor = tensor.to("cpu").contiguous()
                # safetensors refuses tensors that share memory
                is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
                held[name] = tensor.clone() if is_part else tensor
            files[-1].append(name)
            size += tensor.nbytes
            num_bytes += tensor.nbytes
        writing.run(_write, draft / _draft_name(len(files)), held)
        side.agree(self._readable(writing.close()))
        side.agree(self._try(self._finish, draft, files, num_bytes) if is_first else None)

    def _begin(self, draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    def _finish(self, draft: Path, files: list[list[str]], num_bytes: int) -> None:
        if len(files) == 1:
            (draft / _draft_name(1)).rename(draft / "model.safetensors")
        else:
            places: dict[str, str] = {}
            for number, names in enumerate(files, start=1):
                file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
                (draft / _draft_name(number)).rename(draft / file)
                places |= dict.fromkeys(names, file)
            index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
            write_atomic(draft / "model.safetensors.index.json", json.dumps(index, indent=2))
        shutil.rmtree(self.path, ignore_errors=True)
        draft.rename(self.path)

    def _try(self, act: Any, *arguments: Any) -> Exception | None:
        try:
            act(*arguments)
        except Exception as error:
            return self._readable(error)
        return None

    def _readable(self, error: Exception | None) -> Exception | None:
        """Return the error as one that names the directory and what to do."""
        if isinstance(error, SafetensorError):  # it does not tell errno
            return TrainError(
                f"cannot write the weights to {self.path}: {error}",
                hints=["is the disk full? choose another one with --out"],
            )
        try:
            with readable_disk_errors(self.path.parent):
                if error is not None:
                    raise error
        except Exception as readable:
            return readable
        return None


def _draft_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    if not tensors:  # another rank's file
        return
    save_file(tensors, file, metadata={"format": "pt"})
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
