"""Publication where the weights are: a task that every rank of the trainer runs.

    weight sync --RankTask--> RemoteTrainer --pipe, or Ray--> task(side) in each rank
                          or  a trainer in this process ----> task(side)

A task walks through the weights, which all ranks gather together, one tensor at a time. The
weights themselves never pass through the process that drives the run.
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
    """Gives a task the weights, and the place among the ranks."""

    weights: Callable[[torch.dtype | None], Iterator[tuple[str, Tensor]]]
    """Yields Hugging Face names and whole tensors, floating-point ones in the given type; every
    rank must use it up, because all of them gather."""
    ranks: Ranks
    kept: dict[str, Any]
    """What tasks leave in the rank from one publication to the next."""

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, those of tensor and context groups too, in order."""
        if self.ranks.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.ranks.size
        torch.distributed.all_gather_object(gathered, value)
        return gathered

    def agree(self, error: Exception | None) -> None:
        """Return when all ranks have called this; raise the first rank's error in every rank.

        A rank that raised alone would leave the others in a collective for ever.

        Raises:
            GymError: a rank had an error.
        """
        if isinstance(error, OSError) or error is None or isinstance(error, GymError):
            mine = error
        else:
            mine = TrainError(f"the weights were not published: {type(error).__name__}: {error}")
        for other in self.gather(mine):
            if other is not None:
                raise other


class RankTask(Protocol[_Result]):
    """A picklable call; what the first rank returns is the result."""

    def __call__(self, side: RankSide) -> _Result:
        """Run in one rank. A rank that fails must still use up the weights, as the others do."""


@runtime_checkable
class RankTrainer(Protocol):
    """A trainer that runs tasks beside its weights: an optional part of the contract."""

    def run_in_ranks(self, task: RankTask[_T]) -> _T:
        """Return what the first rank's task returns."""


class TrainerWeights:
    """The weights of a trainer, as weight syncs are given them.

    Iterating yields names and tensors in this process; `run_task` publishes without that.
    """

    def __init__(self, trainer: GroupTrainer) -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.trainer.weights()


def run_task(weights: Weights, task: RankTask[_T], kept: dict[str, Any]) -> _T:
    """Run a task where the weights are: in the trainer's ranks, or else in this process.

    `kept` is for tasks in this process; ranks have their own.
    """
    if isinstance(weights, TrainerWeights) and isinstance(weights.trainer, RankTrainer):
        return weights.trainer.run_in_ranks(task)
    return task(RankSide(lambda dtype: cast_all(weights, dtype), ALONE, kept))


def cast_all(weights: Weights, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in the type that is sent."""
    for name, tensor in weights:
        yield name, cast(tensor.detach(), dtype)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a floating-point tensor in `dtype`; others, and all without `dtype`, as they are."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


class OneAhead:
    """Runs one piece of work in a thread while the caller prepares the next.

    After an error, further pieces are dropped: the caller goes on gathering with the other ranks.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="areal-gym-publish")
        self._running: Future[None] | None = None
        self.error: Exception | None = None

    def wait(self) -> None:
        """Return when no piece is being worked on."""
        running, self._running = self._running, None
        if running is not None and (error := running.exception()) is not None:
            if not isinstance(error, Exception):
                raise error
            self.error = self.error or error

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Begin a piece when the one before has ended, unless there was an error."""
        self.wait()
        if self.error is None:
            self._running = self._thread.submit(work, *arguments)

    def close(self) -> Exception | None:
        """Wait for the last piece; return the first error."""
        self.wait()
        self._thread.shutdown()
        return self.error
