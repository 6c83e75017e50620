"""Writes a policy's weights into checkpoints, by all ranks; no process holds the whole model.

    model.safetensors, or model-00001-of-00008.safetensors, ...    in Hugging Face's layout
    trainer/master_weights/                                        if the files are rounded

The files have the types of the checkpoint from which training began. If these cannot hold the
float32 master weights, each rank also keeps its part of the master weights (`trainer.states`), and
a resumed run continues from them. Files in float32 are the master weights themselves.

Several ranks write their parts of the master weights in any case. The rank that exports a file
reads them back tensor by tensor, so nothing is sent between ranks, and training pauses only while a
part is copied into host memory. If the files are float32, the parts are deleted in the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from areal_gym.models.policy_model import PolicyModel
from areal_gym.models.streamed_export import INDEX, ExportPlan, plan_export, write_planned_file
from areal_gym.models.tiny.checkpoint_files import write_file, write_weights
from areal_gym.trainer.base import CheckpointWriter, Trainer
from areal_gym.trainer.states import SavedTensors, StateFiles, copied

STATES = "trainer"
"""The folder of a checkpoint with the trainer's states."""
MASTER_WEIGHTS = "master_weights"
"""The folder of the states with the master weights that the export rounds."""


def save_checkpoint(
    trainer: Trainer[Any], directory: Path, *, is_writer: bool = True
) -> Future[None]:
    """Write a trainer's weights into a directory, and its states into a folder of it.

    A trainer that is not a `CheckpointWriter` has written its weights when this returns: all ranks
    gather them, and the one that `is_writer` writes.
    """
    if isinstance(trainer, CheckpointWriter):
        return trainer.save_checkpoint(directory)
    if is_writer:
        write_weights(trainer.weights(), directory)
    else:
        for _ in trainer.weights():
            pass
    return trainer.save(directory / STATES)


class ExportedWeights:
    """Saves the weights of one policy; all ranks call the same methods in the same order.

    Master weights are not kept if the policy has an adapter: its base does not change, and the
    adapter is among the trainer's states.
    """

    def __init__(self, model: PolicyModel, *, has_adapter: bool) -> None:
        self._model = model
        self._has_adapter = has_adapter
        self._parts = list(model.network_tensors())
        self._plan: ExportPlan | None = None

    def save(self, files: StateFiles, directory: Path) -> Future[None]:
        """Copy the weights, which may change afterwards; the thread of `files` writes them.

        Returns:
            A future that is done when all ranks have written; it holds any error, such as OSError.
        """
        with files.copying():
            state = self.tensors()
            plan = self._plan or plan_export(
                self._model, self._parts, state, num_writers=files.ranks.size
            )
            self._plan = plan
            frozen = {n for n, p in self._model.named_parameters() if not p.requires_grad}
            # Frozen weights that are in host memory need no copy.
            copies = {n: t.cpu() if n in frozen else copied(t) for n, t in state.items()}
            return files.submit(lambda: self._write(plan, copies, files, directory))

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors, each once; of a sharded tensor, this rank's part."""
        state = self._model.state_dict()
        return {name: state[name].detach() for part in self._parts for name in part.sources}

    def num_bytes(self, num_ranks: int) -> int:
        """Return about how many bytes all ranks together have on disk at the peak."""
        main = self._model.stored_types.main
        state = self.tensors()
        held = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        if main is None:
            return held * (1 if num_ranks == 1 else 2)
        exported = sum(tensor.numel() * main.itemsize for tensor in state.values())
        is_written_twice = num_ranks > 1 or (exported < held and not self._has_adapter)
        return exported + (held if is_written_twice else 0)

    def _write(
        self, plan: ExportPlan, copies: dict[str, Tensor], files: StateFiles, directory: Path
    ) -> None:
        is_kept = plan.is_rounded and not self._has_adapter
        masters = directory / STATES / MASTER_WEIGHTS
        is_alone = files.ranks.size == 1
        if is_kept or not is_alone:
            files.write(copies, masters)
        error: Exception | None = None
        try:
            read: Callable[[str], Tensor] = copies.__getitem__
            if not is_alone:
                copies.clear()  # they are on disk
                read = SavedTensors(masters).read
            for number, file in enumerate(plan.files):
                if number % files.ranks.size == files.ranks.rank:
                    write_planned_file(self._model, file, directory, read)
        except Exception as failure:
            error = failure
        files.agree(error)
        if files.ranks.rank == 0:
            if index := plan.index():
                write_file(directory / INDEX, index)
            if not is_kept:
                shutil.rmtree(masters, ignore_errors=True)
