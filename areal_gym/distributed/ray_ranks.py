"""A trainer whose ranks are Ray's actors: on this machine, or on others.

    RayTrainer --groups, in the object store--> a rank for each place: Serving
               <--metrics; the first rank's whole weights, through the object store--

    RaySupervised: the same with examples

The ranks meet at the first one's address. When one of them dies, the others wait for it in vain:
all are ended, and that is a `LostRankError`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from areal_gym.config import TrainerConfig
from areal_gym.distributed.cluster import Cluster
from areal_gym.errors import GymError, LostRankError
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.trainer.out_of_memory import MEMORY_HINTS
from areal_gym.trainer.parallel.worker import (
    ProcessSupervised,
    ProcessTrainer,
    RemoteTrainer,
    Serving,
    readable,
)
from areal_gym.utils.statistics import rss_mb

_END_S = 10.0
"""How long the other ranks may take when one has raised an error: as a rule all raise it."""


class _Placed(RemoteTrainer):
    """A `RemoteTrainer` whose processes are placed by Ray.

    Args:
        cluster: has the places of the role "rank".
        trainer_class: what is registered as the trainer; made in each rank.
        decoder: the policy, on the CPU; it gets the new weights after each step.
        config: the trainer's settings; `num_ranks` says how many ranks there are.
        arguments: further arguments of `trainer_class`.

    Raises:
        GymError: what `trainer_class` raised.
        LostRankError: a rank did not start.
    """

    def __init__(
        self,
        cluster: Cluster,
        trainer_class: Callable[..., Any],
        decoder: Decoder,
        config: TrainerConfig,
        **arguments: Any,
    ) -> None:
        import ray

        self.decoder = decoder
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="areal-gym-saved")
        # A checkpoint is waited for while the next step is being taken.
        rank = ray.remote(concurrency_groups={"saved": 1})(_Rank)
        self._ranks = [
            rank.options(**cluster.options("rank", index)).remote(index)
            for index in range(config.num_ranks)
        ]
        try:
            (meeting,) = self._answers([self._ranks[0].meeting.remote()])
            weights = ray.put(_arrays(decoder))
            shape = (type(decoder), decoder.config)
            making = (trainer_class, shape, config, cluster.device, meeting, arguments)
            self._answers([rank.begin.remote(making, weights) for rank in self._ranks])
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks; each on its own machine."""
        found: list[int] = self._answers([rank.pid.remote() for rank in self._ranks])
        return found

    def close(self) -> None:
        """End the ranks. Idempotent."""
        import ray

        for rank in self._ranks:
            ray.kill(rank)
        self._saving.shutdown(wait=False)

    def save(self, directory: Path) -> Future[None]:
        """See `Trainer.save`; all ranks write there, wherever they are."""
        return super().save(directory.absolute())

    def load(self, directory: Path) -> None:
        """See `Trainer.load`."""
        super().load(directory.absolute())

    def _saved(self) -> None:
        (error,) = self._answers(
            [self._ranks[0].written.options(concurrency_group="saved").remote()]
        )
        if error is not None:
            raise error

    def _ask(self, what: str, *arguments: Any) -> Any:
        import ray

        shared = ray.put(arguments)  # once for all ranks of a machine
        answers = self._answers([rank.do.remote(what, shared) for rank in self._ranks])
        if what in ("step", "load"):
            (arrays,) = self._answers([self._ranks[0].weights.remote()])
            _take(self.decoder, arrays)
        return answers[0]

    def _answers(self, asked: list[Any]) -> list[Any]:
        """What each rank answers.

        Raises:
            GymError: what one of them raised.
            LostRankError: one died.
        """
        import ray

        error: GymError | None = None
        waiting = list(asked)
        try:
            while waiting:
                ready, waiting = ray.wait(waiting, timeout=None if error is None else _END_S)
                if not ready:
                    self.close()  # the others wait for the one that raised
                    break
                answer = ray.get(ready[0])
                if isinstance(answer, GymError):
                    error = error or answer
            if error is None:
                return [ray.get(each) for each in asked]
        except ray.exceptions.RayError as lost:
            self.close()
            raise LostRankError(
                f"a rank of the trainer has died: {str(lost).strip().splitlines()[0]}",
                hints=[
                    "the same command with --resume goes on from the last checkpoint",
                    *MEMORY_HINTS,
                ],
            ) from lost
        raise error

    def _held_mb(self) -> float:
        return float(sum(self._answers([rank.rss_mb.remote() for rank in self._ranks])))


class RayTrainer(_Placed, ProcessTrainer):
    """A `ProcessTrainer` whose processes are placed by Ray."""


class RaySupervised(_Placed, ProcessSupervised):
    """A `ProcessSupervised` whose processes are placed by Ray."""


def _arrays(decoder: Decoder) -> dict[str, Any]:
    """Arrays go through Ray's object store without a copy; tensors do not."""
    return {name: tensor.detach().numpy() for name, tensor in decoder.state_dict().items()}


def _take(decoder: Decoder, arrays: dict[str, Any]) -> None:
    import torch

    for name, tensor in decoder.state_dict().items():
        tensor.copy_(torch.tensor(arrays[name]))  # in the object store it is for reading only


# ---- in the rank -----------------------------------------------------------------------------


class _Rank:
    """One rank; but for `written`, calls come one after the other."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._whole: Decoder | None = None
        self._serving: Serving | None = None
        self._written: SimpleQueue[BaseException | None] = SimpleQueue()

    def pid(self) -> int:
        return os.getpid()

    def rss_mb(self) -> float:
        return rss_mb() or 0.0

    def meeting(self) -> str:
        """An address of this machine where nobody listens yet."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def begin(self, making: tuple[Any, ...], arrays: dict[str, Any]) -> GymError | None:
        """Meet the others and make the trainer; what was wrong with it, if anything was."""
        import torch

        trainer_class, shape, config, device, meeting, arguments = making
        torch.set_num_threads(config.num_threads)
        try:
            kind, decoder_config = shape
            self._whole = kind(decoder_config)
            _take(self._whole, arrays)
            self._serving = Serving(
                self._rank,
                self._written.put,
                trainer_class,
                self._whole,
                config,
                device,
                meeting,
                arguments,
            )
        except Exception as error:
            return readable(error)
        return None

    def do(self, what: str, arguments: tuple[Any, ...]) -> Any:
        """The trainer's answer, or what it raised."""
        assert self._serving is not None
        try:
            return self._serving.do(what, *arguments)
        except Exception as error:
            return readable(error)

    def written(self) -> BaseException | None:
        """Wait until the checkpoint that was begun is on the disk; what is wrong, if anything."""
        return self._written.get()

    def weights(self) -> dict[str, Any]:
        assert self._whole is not None
        return _arrays(self._whole)
