"""A policy's weights in checkpoints, written by the ranks; no process holds the whole model.

    model.safetensors, or model-00001-of-00008.safetensors, ...    in Hugging Face's layout
    trainer/master_weights/                                        where these are rounded

Files are in the types of the checkpoint that training began from. Where these cannot hold the
float32 master weights, each rank's part of these is kept beside them (`trainer.states`), and a run
goes on from those. Float32 files are the master weights: there is one copy.

Several ranks write their parts in any case: what they have written is read again, tensor by tensor,
by the rank that writes a file of the export. So nothing is sent from rank to rank, and training is
disturbed for as long as it takes to copy a part into host memory. Where the files are float32, the
parts are deleted in the end.
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
"""The folder of a checkpoint that holds a trainer's states."""
MASTER_WEIGHTS = "master_weights"
"""The folder of the states that holds master weights which the export rounds."""


def save_checkpoint(
    trainer: Trainer[Any], directory: Path, *, is_writer: bool = True
) -> Future[None]:
    """Let a trainer write its weights into a directory, and its states into a folder of that.

    A trainer that is no `CheckpointWriter` is waited for until its weights are written; all ranks
    take part in gathering them, and the one that `is_writer` writes.
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

    A policy with an adapter keeps no master weights: its base does not change, and the adapter is
    among the trainer's states.
    """

    def __init__(self, model: PolicyModel, *, has_adapter: bool) -> None:
        self._model = model
        self._has_adapter = has_adapter
        self._parts = list(model.network_tensors())
        self._plan: ExportPlan | None = None

    def save(self, files: StateFiles, directory: Path) -> Future[None]:
        """Copy the weights, which may change afterwards; the thread of `files` writes them.

        Returns:
            Done when all ranks have written; else it has the OSError, or what else happened.
        """
        with files.copying():
            state = self.tensors()
            plan = self._plan or plan_export(
                self._model, self._parts, state, num_writers=files.ranks.size
            )
            self._plan = plan
            frozen = {n for n, p in self._model.named_parameters() if not p.requires_grad}
            # What is frozen is not copied where it is in host memory already.
            copies = {n: t.cpu() if n in frozen else copied(t) for n, t in state.items()}
            return files.submit(lambda: self._write(plan, copies, files, directory))

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors, each once; of sharded ones this rank's part."""
        state = self._model.state_dict()
        return {name: state[name].detach() for part in self._parts for name in part.sources}

    def num_bytes(self, num_ranks: int) -> int:
        """Return about how many bytes are written, all ranks together, at the peak."""
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
                copies.clear()  # they are on the disk
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
