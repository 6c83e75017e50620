"""A trainer whose ranks are Ray's actors: on this machine, or on others.

    RayTrainer --groups or examples, in the object store--> a rank for each place: Serving
               <--metrics; weights, part by part, through the object store--

Each rank reads its weights from the checkpoint, which all machines must see.

The ranks meet at the first one's address. When one of them dies, the others wait for it in vain:
all are ended, and that is a `LostRankError`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from areal_gym.config import TrainerConfig
from areal_gym.distributed.cluster import Cluster
from areal_gym.errors import GymError, LostRankError, TrainError
from areal_gym.models.backend import AUTO, ModelLoader
from areal_gym.trainer.out_of_memory import DEATH_HINTS
from areal_gym.trainer.parallel.remote_trainer import (
    RemoteTrainer,
    Serving,
    TrainerRecipe,
    readable,
)
from areal_gym.utils.statistics import rss_mb

_END_S = 10.0
"""How long the other ranks may take when one has raised an error: as a rule all raise it."""


class RayTrainer(RemoteTrainer):
    """A trainer of `config.num_ranks` processes in the cluster's places of the role "rank".

    Each rank calls `trainer_class` with further `arguments`. It starts from the checkpoint
    `policy`, which `loader` reads.

    Raises:
        GymError: what `trainer_class` raised.
        LostRankError: a rank did not start.
    """

    def __init__(
        self,
        cluster: Cluster,
        trainer_class: Callable[..., Any],
        policy: Path,
        config: TrainerConfig,
        *,
        loader: ModelLoader = AUTO,
        **arguments: Any,
    ) -> None:
        import ray

        super().__init__(policy, loader, trainer_class, config)
        # A checkpoint is waited for while the next step is being taken.
        rank = ray.remote(concurrency_groups={"saved": 1})(_Rank)
        self._ranks = [
            rank.options(**cluster.options("rank", index)).remote()
            for index in range(config.num_ranks)
        ]
        self._places: list[str] = []
        self._first_failure: tuple[Exception, int] | None = None
        try:
            (meeting,) = self._answers([self._ranks[0].meeting.remote()])
            self._places = self._answers([rank.place.remote() for rank in self._ranks])
            recipe = TrainerRecipe(
                trainer_class=trainer_class,
                policy=policy.absolute(),
                loader=loader,
                config=config,
                device=cluster.device,
                meeting=meeting,
                arguments=arguments,
            )
            self._answers([rank.begin.remote(recipe, i) for i, rank in enumerate(self._ranks)])
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks; each on its own machine."""
        return self._answers([rank.pid.remote() for rank in self._ranks])

    def close(self) -> None:
        """End the ranks. Idempotent."""
        import ray

        for rank in self._ranks:
            ray.kill(rank)
        self._saving.shutdown(wait=False)

    def _wait_for_checkpoint(self) -> None:
        (error,) = self._answers(
            [self._ranks[0].written.options(concurrency_group="saved").remote()]
        )
        if error is not None:
            raise error

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        shared = ray.put(arguments)  # once for all ranks of a machine
        return self._answers([rank.call.remote(method, shared) for rank in self._ranks])[0]

    def _ask_each(self, method: str, arguments: Sequence[Any]) -> None:
        pairs = zip(self._ranks, arguments, strict=True)
        self._answers([rank.call.remote(method, (argument,)) for rank, argument in pairs])

    def _answers(self, asked: list[Any]) -> list[Any]:
        """Return what was asked of ranks 0, 1, ...: their answers, in this order.

        Raises:
            GymError: a rank's own error.
            LostRankError: a rank died; names it, and its host.
            TrainError: Ray could not bring a rank's answer here.
        """
        import ray

        error: GymError | None = None
        waiting, rank = list(asked), 0
        try:
            while waiting:
                ready, waiting = ray.wait(waiting, timeout=None if error is None else _END_S)
                if not ready:
                    self.close()  # the others wait for the one that raised
                    break
                rank = asked.index(ready[0])
                answer = ray.get(ready[0])
                if isinstance(answer, GymError):
                    error = error or answer
            if error is None:
                return [ray.get(each) for each in asked]
        except ray.exceptions.RayError as lost:
            # A step and a checkpoint are waited for by two threads; for the second of them, the
            # ranks that `close` ends here have died too.
            self._first_failure = self._first_failure or (lost, rank)
            self.close()
            raise self._failure(*self._first_failure) from lost
        raise error

    def _failure(self, lost: Exception, rank: int) -> TrainError:
        """Return the error to raise for one of Ray's, which came instead of `rank`'s answer."""
        import ray

        reason = str(lost).strip().splitlines()[0]
        if not isinstance(lost, _deaths()):
            return TrainError(f"Ray has lost an answer of rank {rank} of the trainer: {reason}")
        if isinstance(lost, ray.exceptions.RayActorError):
            ids = [each._actor_id.hex() for each in self._ranks]
            rank = ids.index(lost.actor_id) if lost.actor_id in ids else rank
        place = f": {self._places[rank]}" if self._places else ""
        return LostRankError(
            f"rank {rank} of the trainer has died{place} ({reason})", hints=DEATH_HINTS
        )

    def _held_mb(self) -> float:
        return float(sum(self._answers([rank.rss_mb.remote() for rank in self._ranks])))


def _deaths() -> tuple[type[Exception], ...]:
    """Return Ray's errors for a process or a machine that is gone."""
    from ray import exceptions as errors

    # An answer is lost with the machine that keeps it, which is its rank's own.
    machine = (errors.NodeDiedError, errors.LocalRayletDiedError, errors.ObjectLostError)
    return (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError, *machine)


class _Rank:
    """The actor of one rank; but for `written`, calls come one after the other."""

    def __init__(self) -> None:
        self._serving: Serving | None = None
        self._written: SimpleQueue[BaseException | None] = SimpleQueue()

    def pid(self) -> int:
        return os.getpid()

    def place(self) -> str:
        return f"process {os.getpid()} on {socket.gethostname()}"

    def rss_mb(self) -> float:
        return rss_mb() or 0.0

    def meeting(self) -> str:
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def begin(self, recipe: TrainerRecipe, rank: int) -> GymError | None:
        try:
            self._serving = Serving(recipe, rank, self._written.put)
        except Exception as error:
            return readable(error)
        return None

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        assert self._serving is not None
        try:
            return self._serving.call(method, *arguments)
        except Exception as error:
            return readable(error)

    def written(self) -> BaseException | None:
        """Wait for the checkpoint that was begun; return what is wrong with it, if anything."""
        return self._written.get()
