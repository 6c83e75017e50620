"""A trainer in other processes: its proxy in this process, and its ranks in those.

RemoteTrainer.step  --what starts the ranks: `worker`, `distributed.ray_ranks`-->  Serving.call
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, GymError, TrainError
from areal_gym.models.backend import ModelLoader
from areal_gym.models.device import (
    is_accelerator,
    pick_device,
    process_group_backend,
    use_device_of_rank,
)
from areal_gym.models.stored_types import read_stored_types
from areal_gym.models.tiny.checkpoint_files import weight_files
from areal_gym.trainer.batch.examples import Example
from areal_gym.trainer.batch.rank_batches import OwnTokens, divide, with_tokens
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.exported_weights import save_checkpoint
from areal_gym.trainer.out_of_memory import out_of_memory
from areal_gym.trainer.parallel.fsdp import load_for_training
from areal_gym.trainer.parallel.process_group import Meeting
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks
from areal_gym.trainer.trainer import Trainer
from areal_gym.trainer.weight_sync.rank_tasks import RankTask
from areal_gym.types import Group, Task, TopTokens

_T = TypeVar("_T")
_PART_BYTES = 16_000_000
"""The least bytes of weights in one answer of the ranks; one tensor may be larger."""


class RemoteTrainer(ABC):
    """Forwards the methods of `Trainer` and `Supervised` to the ranks, which raise their errors.

    This process has no weights: `decoder` has names and shapes only, and `weights` receives them in
    parts while they are used.
    """

    def __init__(
        self,
        policy: Path,
        loader: ModelLoader,
        trainer_class: Callable[..., Any],
        config: TrainerConfig,
    ) -> None:
        self._config = config
        # Another trainer's `step` may read every token of the batch.
        is_ours = getattr(trainer_class, "step", None) is Trainer.step
        self._divides_batches = is_ours and config.layout.num_data_ranks > 1
        self.decoder = loader.without_weights(policy)
        self.decoder.stored_types = read_stored_types(weight_files(policy))
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="areal-gym-saved")

    def step(self, batch: Sequence[Group] | Sequence[Example], version: int) -> dict[str, float]:
        """Train once on a batch and return its metrics.

        Raises:
            TrainError: a rank died, or the trainer raised it.
        """
        groups = [_slim(item) for item in batch if isinstance(item, Group)]
        sent: Sequence[Group] | Sequence[Example] = groups or batch
        if groups and self._divides_batches:
            layout = self._config.layout
            sent, own = divide(groups, layout, self._config.minibatches)
            data_ranks = (Ranks(rank, layout).data_rank for rank in range(layout.num_ranks))
            self._ask_each("take_tokens", [own[data_rank] for data_rank in data_ranks])
        metrics: dict[str, float] = self._ask("step", sent, version)
        metrics["memory/trainer_rss_mb"] = self._held_mb()
        return metrics

    def evaluate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Return the loss and metrics on held-out examples."""
        metrics: dict[str, float] = self._ask("evaluate", examples)
        return metrics

    def score(self, rows: list[TokenSequence]) -> list[Tensor]:
        """Return the log-probabilities of each row's trained tokens, [T]."""
        return [torch.tensor(score) for score in self._ask("score", rows)]

    def score_at(self, rows: list[TokenSequence], temperature: float) -> list[Tensor]:
        """Return what `score` does, at this temperature instead of the sampling temperature."""
        return [torch.tensor(score) for score in self._ask("score_at", rows, temperature)]

    def score_top(self, rows: list[TokenSequence], top_k: int) -> list[TopTokens]:
        """Return the likeliest tokens at each row's trained tokens, at temperature 1."""
        tops: list[TopTokens] = self._ask("score_top", rows, top_k)
        return tops

    def recompute_proximal(self) -> None:
        """Take ratios against the trainer's own log-probabilities from now on."""
        self._ask("recompute_proximal")

    def trained_tokens(self) -> list[dict[str, Any]]:
        """Return the advantages and log-probabilities of the last step's tokens, row by row."""
        rows: list[dict[str, Any]] = self._ask("trained_tokens")
        return rows

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and tensors; exhaust it before the next step."""
        return self._received("weights")

    def run_in_ranks(self, task: RankTask[_T]) -> _T:
        """Run a picklable task with the weights in every rank; return the first one's result."""
        result: _T = self._ask("run_in_ranks", task)
        return result

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapter's tensors by peft's names."""
        return dict(self._received("adapter"))

    def offload(self) -> None:
        """Let every rank move its weights and optimizer states into host memory."""
        self._ask("offload")

    def reload(self) -> None:
        """Let every rank move its weights and optimizer states back to its GPU."""
        self._ask("reload")

    def checkpoint_bytes(self) -> int:
        """Return the approximate bytes of a checkpoint."""
        num_bytes: int = self._ask("checkpoint_bytes")
        return num_bytes

    def save(self, directory: Path) -> Future[None]:
        """Write the states in all ranks; the next steps may run meanwhile."""
        self._ask("save", directory.absolute())
        return self._saving.submit(self._wait_for_checkpoint)

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """Write weights and states in all ranks; the next steps may run meanwhile."""
        self._ask("save_checkpoint", directory.absolute())
        return self._saving.submit(self._wait_for_checkpoint)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        self._ask("load", directory.absolute())

    def _received(self, method: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a method gathers in the ranks, part by part."""
        begins: str | None = method
        while part := self._ask("next_tensors", begins):
            begins = None
            for name, dtype, shape, array in part:
                yield name, torch.tensor(array).view(dtype).view(shape)

    @abstractmethod
    def close(self) -> None:
        """End the ranks. Idempotent."""

    @abstractmethod
    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of every rank; return the first rank's result once all have answered."""

    @abstractmethod
    def _ask_each(self, method: str, arguments: Sequence[Any]) -> None:
        """Call a method of every rank with its own argument; return once all have answered."""

    @abstractmethod
    def _wait_for_checkpoint(self) -> None:
        """Wait until all ranks have written; raise the error if one failed."""

    @abstractmethod
    def _held_mb(self) -> float:
        """Return the memory of all ranks in 10^6 bytes."""


def _slim(group: Group) -> Group:
    """Return the group without texts and task data, which no trainer reads."""
    task = Task(id=group.task.id, data={}, split=group.task.split)
    return replace(
        group,
        task=task,
        trajectories=tuple(replace(t, task=task, messages=(), metrics={}) for t in group),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerRecipe:
    """The parts from which every rank makes its trainer; picklable."""

    trainer_class: Callable[..., Any]
    policy: Path
    """The checkpoint with the initial weights, which every rank reads."""
    loader: ModelLoader
    config: TrainerConfig
    device: str
    """"cpu", or an accelerator; a process that sees several takes that of its rank."""
    meeting: str
    """The URL at which the ranks find each other (see `process_group.Meeting`)."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `trainer_class`."""


class Serving:
    """A trainer that is one of the ranks, and answers calls.

    The first rank calls `tell`, in a thread, with None when a checkpoint is on disk, else with the
    error.

    Raises:
        ConfigError: the policy's checkpoint is missing on this machine.
        TrainError: the ranks did not find or reach each other in time.
    """

    def __init__(
        self, recipe: TrainerRecipe, rank: int, tell: Callable[[BaseException | None], None]
    ) -> None:
        config, device = recipe.config, pick_device(recipe.device, "trainer.device")
        torch.set_num_threads(config.num_threads)
        if not recipe.policy.is_dir():
            raise ConfigError(
                f"rank {rank} of the trainer, on {socket.gethostname()}, does not see the "
                f"checkpoint {recipe.policy}",
                hints=["put it, and the run directory, on a file system that all machines share"],
            )
        arguments, ranks = dict(recipe.arguments), ALONE
        if config.num_ranks > 1:
            if is_accelerator(device):
                os.environ["LOCAL_RANK"] = str(use_device_of_rank(rank))  # for transformers
            # With offloading, the gradients' norm is summed on the CPU.
            backend = process_group_backend(device, offloads=config.cpu_offload)
            meeting = Meeting(
                url=recipe.meeting,
                rank=rank,
                size=config.num_ranks,
                timeout_s=config.connect_timeout_s,
            )
            meeting.join(backend, [device, "cpu"] if "cpu:" in backend else [device])
            arguments["ranks"] = ranks = Ranks(rank, config.layout, device.type)
        decoder = load_for_training(
            recipe.policy, config, ranks, device=device, loader=recipe.loader
        )
        self._is_writer = rank == 0
        self._tell = tell
        self._trainer = recipe.trainer_class(decoder, config, **arguments)
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())
        self._own_tokens: OwnTokens | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the trainer, or `next_tensors`."""
        if method == "next_tensors":
            return self._next_tensors(*arguments)
        if method == "take_tokens":
            (self._own_tokens,) = arguments
            return None
        if method == "step" and self._own_tokens is not None:
            groups, version = arguments
            arguments = (with_tokens(groups, self._own_tokens), version)
            self._own_tokens = None
        trainer = self._trainer
        answer: Any = (
            save_checkpoint(trainer, *arguments, is_writer=self._is_writer)
            if method == "save_checkpoint"
            else getattr(trainer, method)(*arguments)
        )
        scores = ("score", "score_at", "score_top", "trained_tokens")
        if method in scores and not self._is_writer:
            return None  # only the first rank's answer is read
        if method in ("score", "score_at"):
            return [logprobs_T.cpu().numpy().copy() for logprobs_T in answer]
        if method in ("save", "save_checkpoint"):
            if self._is_writer:
                answer.add_done_callback(self._tell_of_checkpoint)
            return None
        return answer

    def _next_tensors(self, begins: str | None) -> list[tuple[str, torch.dtype, torch.Size, Any]]:
        """Return the next whole tensors as byte arrays; all ranks gather, the first returns them.

        `begins` is a method, "weights" or "adapter", whose tensors are started; None continues.
        """
        if begins is not None:
            tensors = getattr(self._trainer, begins)()
            self._tensors = iter(tensors.items() if isinstance(tensors, dict) else tensors)
        part, num_bytes = [], 0
        for name, tensor in self._tensors:
            if self._is_writer:
                raw = tensor.cpu().contiguous().flatten().view(torch.uint8)
                part.append((name, tensor.dtype, tensor.shape, raw.numpy()))
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= _PART_BYTES:
                break
        return part

    def _tell_of_checkpoint(self, written: Future[None]) -> None:
        error = written.exception()
        # An OSError such as a full disk is passed on unchanged: the trainer is not at fault.
        self._tell(error if error is None or isinstance(error, OSError) else readable(error))


def readable(error: BaseException) -> GymError:
    """Return an exception of the trainer as an error for the process that called it."""
    if isinstance(error, GymError):
        return error
    no_memory = out_of_memory(error)
    return no_memory or TrainError(f"the trainer failed: {type(error).__name__}: {error}")
