"""Runs publication where the weights are: as a task in every rank of the trainer.

    weight sync --RankTask--> RemoteTrainer --pipe, or Ray--> task(side) in each rank
                          or  a trainer in this process ----> task(side)

A task iterates over the weights, which all ranks gather together, one tensor at a time. The weights
never pass through the process that drives the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from areal_gym.errors import GymError, TrainError
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks

if TYPE_CHECKING:
    from areal_gym.trainer.base import GroupTrainer, Weights

_T = TypeVar("_T")
_Result = TypeVar("_Result", covariant=True)


@dataclass(frozen=True, slots=True)
class RankSide:
    """Gives a task the weights, and this rank's place among the ranks."""

    weights: Callable[[torch.dtype | None], Iterator[tuple[str, Tensor]]]
    """Yields Hugging Face names and whole tensors, floating-point ones in the given type. Every
    rank must exhaust it, because gathering is collective."""
    ranks: Ranks
    kept: dict[str, Any]
    """Objects that tasks keep in the rank between publications."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in order, including those of tensor and context groups."""
        if self.ranks.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.ranks.size
        torch.distributed.all_gather_object(gathered, value)
        return gathered

    def agree(self, error: Exception | None) -> None:
        """Wait for all ranks to call this; raise the first rank's error in every rank.

        A rank that raised alone would leave the others in a collective for ever.

        Raises:
            GymError: a rank had an error.
        """
        if isinstance(error, OSError) or error is None or isinstance(error, GymError):
            own = error
        else:
            own = TrainError(f"the weights were not published: {type(error).__name__}: {error}")
        for rank_error in self.gather(own):
            if rank_error is not None:
                raise rank_error


class RankTask(Protocol[_Result]):
    """A picklable call that runs in every rank; the first rank's result is returned."""

    def __call__(self, side: RankSide) -> _Result:
        """Run in one rank. Even a rank that fails must exhaust the weights, as the others do."""


@runtime_checkable
class RankTrainer(Protocol):
    """A trainer that runs tasks with its weights: an optional part of the contract."""

    def run_in_ranks(self, task: RankTask[_T]) -> _T:
        """Run the task in every rank; return the first rank's result."""


class TrainerWeights:
    """The weights of a trainer, in the form that weight syncs get.

    Iterating yields names and tensors in this process; `run_task` publishes without iterating here.
    """

    def __init__(self, trainer: GroupTrainer) -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.trainer.weights()


def run_task(weights: Weights, task: RankTask[_T], kept: dict[str, Any]) -> _T:
    """Run a task where the weights are: in the trainer's ranks, else in this process.

    `kept` is `RankSide.kept` of a task in this process; ranks have their own.
    """
    if isinstance(weights, TrainerWeights) and isinstance(weights.trainer, RankTrainer):
        return weights.trainer.run_in_ranks(task)
    return task(RankSide(lambda dtype: cast_all(weights, dtype), ALONE, kept))


def cast_all(weights: Weights, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in the type that is sent."""
    for name, tensor in weights:
        yield name, cast(tensor.detach(), dtype)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a floating-point tensor in `dtype`; return others unchanged."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


class OneAhead:
    """Runs one job in a thread while the caller prepares the next.

    After an error, further jobs are dropped, while the caller keeps gathering with other ranks.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="areal-gym-publish")
        self._running: Future[None] | None = None
        self.error: Exception | None = None

    def wait(self) -> None:
        """Wait until no job is running."""
        running, self._running = self._running, None
        if running is not None and (error := running.exception()) is not None:
            if not isinstance(error, Exception):
                raise error
            self.error = self.error or error

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Begin a job after the previous one has ended, unless there was an error."""
        self.wait()
        if self.error is None:
            self._running = self._thread.submit(work, *arguments)

    def close(self) -> Exception | None:
        """Wait for the last job; return the first error."""
        self.wait()
        self._thread.shutdown()
        return self.error
