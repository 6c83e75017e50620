"""A trainer's states on disk, by `torch.distributed.checkpoint`; each rank has its own part.

    __0_0.distcp, __1_0.distcp, ...    each rank's part of the tensors
    .metadata                          names and shapes, and the place of each piece; written last;
                                       read as data (`trainer.state_index`)

A rank that reads a sharded tensor takes its part from all files. So any number of ranks can read
what any other number wrote, and no rank ever holds a whole tensor.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from areal_gym.errors import ConfigError, TrainError
from areal_gym.trainer.packed_pieces import in_pieces
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.trainer.state_index import StateReader, read_index

# torch warns even callers that asked for this.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class StateFiles:
    """Writes named tensors in a thread, while training continues, and reads them.

    All ranks call the same methods in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="areal-gym-states")
        self._jobs: list[Future[None]] = []
        self._copying = Lock()

    @cached_property
    def _group(self) -> torch.distributed.ProcessGroup | None:
        """A process group apart from that of training, which continues meanwhile."""
        return torch.distributed.new_group(backend="gloo") if self.ranks.size > 1 else None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Wait until all earlier jobs have written; jobs submitted in the block begin after it.

        So there is one set of copies at a time, and no thread that writes slows the copying down.
        """
        if self._copying.locked():  # by this thread: several calls copy one checkpoint
            yield
            return
        wait(self._jobs)
        self._jobs.clear()
        _ = self._group  # created here, in the same order on all ranks
        with self._copying:
            yield

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run a job in the writing thread, after the jobs before it."""

        def run() -> None:
            with self._copying:
                pass
            job()

        self._jobs.append(self._thread.submit(run))
        return self._jobs[-1]

    def save(self, states: Mapping[str, Tensor], directory: Path) -> Future[None]:
        """Copy the tensors, which may change afterwards; a thread writes the copies.

        Returns:
            A future that is done when everything is on disk; it holds any error, such as OSError.
        """
        with self.copying():
            copies = {name: copied(tensor) for name, tensor in states.items()}
            return self.submit(lambda: self.write(copies, directory))

    def load(self, states: Mapping[str, Tensor], directory: Path) -> None:
        """Read into these tensors, whose shapes `saved_tensors` tells.

        Raises:
            TrainError: names are missing on disk, or other names are there.
        """
        _require_same_names(states.keys(), saved_tensors(directory).keys())
        with _reason_alone():
            load(
                {name: in_pieces(tensor) for name, tensor in states.items()},
                storage_reader=StateReader(directory),
                process_group=self._group,
                no_dist=self.ranks.size == 1,
            )

    def agree(self, error: Exception | None) -> None:
        """Raise the error of the first rank that has one, on every rank."""
        errors = [error]
        if self.ranks.size > 1:
            errors *= self.ranks.size
            torch.distributed.all_gather_object(errors, error, group=self._group)
        for rank_error in errors:
            if rank_error is not None:
                raise rank_error

    def write(self, copies: Mapping[str, Tensor], directory: Path) -> None:
        """Write tensors that nothing changes meanwhile; called in a job. Each rank writes its part.

        Raises:
            OSError: a rank's disk is full or not writable.
        """
        with _reason_alone():
            save(
                {name: in_pieces(tensor) for name, tensor in copies.items()},
                storage_writer=_Writer(directory),
                process_group=self._group,
                no_dist=self.ranks.size == 1,
            )


def copied(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; of a sharded tensor, a copy of this rank's part."""
    return tensor.detach().to("cpu", copy=True)


class SavedTensors:
    """Reads whole tensors one at a time, in any process, whatever number of ranks wrote them.

    Raises:
        ConfigError: the index is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._index = read_index(directory)

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        meta = self._index.state_dict_metadata[name]
        assert isinstance(meta, TensorStorageMetadata)
        tensor = torch.empty(meta.size, dtype=meta.properties.dtype)
        load({name: tensor}, storage_reader=StateReader(self._directory, self._index), no_dist=True)
        return tensor


def saved_tensors(directory: Path) -> Mapping[str, TensorStorageMetadata]:
    """Return the shapes and types of the tensors that were saved in a directory, by name."""
    tensors = read_index(directory).state_dict_metadata.items()
    return {name: meta for name, meta in tensors if isinstance(meta, TensorStorageMetadata)}


def require_whole_states(directory: Path) -> None:
    """Raise ConfigError if a file of the states is missing, or shorter than its index says."""
    lengths: dict[str, int] = {}
    for piece in read_index(directory).storage_data.values():
        name, end = piece.relative_path, piece.offset + piece.length
        lengths[name] = max(end, lengths.get(name, 0))
    for name, length in sorted(lengths.items()):
        file = directory / name
        size = file.stat().st_size if file.exists() else 0
        if size < length:
            raise ConfigError(f"{file} is truncated: it has {size} bytes of {length}")


def room_for_moments(module: nn.Module) -> int:
    """Return the bytes, over all ranks, of AdamW's two moments of the trained weights."""
    return sum(8 * p.numel() for p in module.parameters() if p.requires_grad)


def prefixed(prefix: str, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors, named `prefix.name`."""
    return {f"{prefix}.{name}": tensor for name, tensor in states.items()}


def below(
    prefix: str, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, TensorStorageMetadata]:
    """Return the tensors named `prefix.name`, by `name`."""
    start = prefix + "."
    return {n.removeprefix(start): meta for n, meta in saved.items() if n.startswith(start)}


def _require_same_names(ours: Set[str], theirs: Set[str]) -> None:
    missing, unknown = sorted(ours - theirs), sorted(theirs - ours)
    if any(name.startswith("critic.") for name in missing):
        raise TrainError("it has no critic like ours, which trainer.advantage needs")
    if missing or unknown:
        raise TrainError(
            "it was saved with other settings of the trainer: "
            f"{', '.join(missing[:2]) or 'nothing'} is missing, "
            f"and {', '.join(unknown[:2]) or 'nothing'} is unknown"
        )


class _Writer(FileSystemWriter):
    def write_data(self, *arguments: Any) -> Any:
        try:
            return super().write_data(*arguments)
        except RuntimeError as error:
            # For a full disk, torch.save reports an unexpected file position.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if isinstance(cause, OSError):
                raise OSError(cause.errno, os.strerror(cause.errno or 0), str(self.path)) from None
            raise


@contextmanager
def _reason_alone() -> Iterator[None]:
    """Raise the first failed rank's error, without the other ranks' stacks."""
    try:
        yield
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        raise reason from None
