"""A trainer's states on the disk: `torch.distributed.checkpoint`, each rank with its own part.

    __0_0.distcp, __1_0.distcp, ...    what each rank holds of the tensors
    .metadata                          names and shapes, and where each piece lies; written last;
                                       read as data (`trainer.state_index`)

Who reads a sharded tensor takes from all the files what belongs to its own part. So any number of
ranks reads what any other number wrote, and nobody ever holds the whole.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from areal_gym.errors import ConfigError, TrainError
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.trainer.state_index import StateReader, read_index

# It is said even to those who have asked for just that.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class StateFiles:
    """Writes and reads named tensors; all ranks call the same methods in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="areal-gym-states")
        self._writing: Future[None] | None = None
        self._own_group: Any = None

    def save(self, states: Mapping[str, Tensor], directory: Path) -> Future[None]:
        """Copy the tensors, which may change afterwards; a thread writes the copies.

        Waits for the one before, so that there is never more than one set of copies.

        Returns:
            Done when everything is on the disk; else it has the OSError, or what else happened.
        """
        if self._writing is not None:
            wait([self._writing])
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in states.items()}
        self._writing = self._thread.submit(self._write, copies, directory, self._group())
        return self._writing

    def load(self, states: Mapping[str, Tensor], directory: Path) -> None:
        """Read into these tensors, which have the shapes that `saved_tensors` tells.

        Raises:
            TrainError: there are others, or there is none for one of these.
        """
        _require_same_names(states.keys(), saved_tensors(directory).keys())
        with _reason_alone():
            load(
                dict(states),
                storage_reader=StateReader(directory),
                process_group=self._group(),
                no_dist=self._ranks.size == 1,
            )

    def _write(self, copies: dict[str, Tensor], directory: Path, group: Any) -> None:
        with _reason_alone():
            save(
                copies,
                storage_writer=_Writer(directory),
                process_group=group,
                no_dist=self._ranks.size == 1,
            )

    def _group(self) -> Any:
        """What the ranks agree over: training, which goes on meanwhile, has another one."""
        if self._own_group is None and self._ranks.size > 1:
            self._own_group = torch.distributed.new_group(backend="gloo")
        return self._own_group


def saved_tensors(directory: Path) -> Mapping[str, TensorStorageMetadata]:
    """Names, shapes and types of what was written there."""
    found = read_index(directory).state_dict_metadata
    return {n: what for n, what in found.items() if isinstance(what, TensorStorageMetadata)}


def require_whole_states(directory: Path) -> None:
    """Refuse what has lost a part of what was written.

    Raises:
        ConfigError: a file is missing, or shorter than it was; the message names it.
    """
    pieces = read_index(directory).storage_data.values()
    for name in sorted({piece.relative_path for piece in pieces}):
        file = directory / name
        wanted = max(p.offset + p.length for p in pieces if p.relative_path == name)
        found = file.stat().st_size if file.exists() else 0
        if found < wanted:
            raise ConfigError(f"{file} is truncated: it has {found} bytes of {wanted}")


def room_for(module: nn.Module) -> int:
    """Bytes of its weights, and of the two numbers that AdamW keeps for each one it trains.

    Whole tensors count, of which this rank may hold a part; all are float32.
    """
    return sum(4 * p.numel() * (3 if p.requires_grad else 1) for p in module.parameters())


def prefixed(prefix: str, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, named `prefix.name`."""
    return {f"{prefix}.{name}": tensor for name, tensor in states.items()}


def below(
    prefix: str, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, TensorStorageMetadata]:
    """Those named `prefix.name`, by name."""
    start = prefix + "."
    return {n.removeprefix(start): found for n, found in saved.items() if n.startswith(start)}


def _require_same_names(ours: Set[str], theirs: Set[str]) -> None:
    missing, unknown = sorted(ours - theirs), sorted(theirs - ours)
    if any(name.startswith("critic.") for name in missing):
        raise TrainError("it holds no critic like ours, which trainer.advantage needs")
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
            # Of a full disk, torch.save reports that it stands at another place than it thought.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if isinstance(cause, OSError):
                raise OSError(cause.errno, os.strerror(cause.errno or 0), str(self.path)) from None
            raise


@contextmanager
def _reason_alone() -> Iterator[None]:
    """What the first rank that failed has to say, without the other ranks' stacks."""
    try:
        yield
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        raise reason from None
