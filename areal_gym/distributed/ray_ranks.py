"""A trainer whose ranks are Ray actors, on this machine or on others.

    RayTrainer --groups or examples, in the object store--> a rank for each place: Serving
               <--metrics; weights, part by part, through the object store--

Each rank reads its weights from the checkpoint, whose path must exist on all machines.

The ranks connect at the first one's address. If one of them dies, the others would wait for it
forever; all are ended, and a `LostRankError` is raised.
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
"""How long to wait for the other ranks when one has raised an error, which usually all raise."""


class RayTrainer(RemoteTrainer):
    """A trainer of `config.num_ranks` processes in the cluster's places with the role "rank".

    Args:
        cluster: the cluster with the places.
        trainer_class: makes the trainer of each rank.
        policy: the checkpoint with which the ranks start.
        config: the settings of the trainer.
        loader: reads the checkpoint.
        **arguments: further arguments of `trainer_class`.

    Raises:
        GymError: `trainer_class` raised it.
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
        # The wait for a checkpoint runs concurrently with the next step.
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
        """The process ids of the ranks, which may be on different machines."""
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

        shared = ray.put(arguments)  # sent only once to each machine
        return self._answers([rank.call.remote(method, shared) for rank in self._ranks])[0]

    def _ask_each(self, method: str, arguments: Sequence[Any]) -> None:
        pairs = zip(self._ranks, arguments, strict=True)
        self._answers([rank.call.remote(method, (argument,)) for rank, argument in pairs])

    def _answers(self, calls: list[Any]) -> list[Any]:
        """Return the results of calls of ranks 0, 1, ..., in this order.

        Raises:
            GymError: a rank raised it.
            LostRankError: a rank died; the message has its number and host.
            TrainError: Ray has lost a rank's answer.
        """
        import ray

        error: GymError | None = None
        waiting, rank = list(calls), 0
        try:
            while waiting:
                ready, waiting = ray.wait(waiting, timeout=None if error is None else _END_S)
                if not ready:
                    self.close()  # the others wait for the rank that raised
                    break
                rank = calls.index(ready[0])
                answer = ray.get(ready[0])
                if isinstance(answer, GymError):
                    error = error or answer
            if error is None:
                return [ray.get(call) for call in calls]
        except ray.exceptions.RayError as lost:
            # Two threads may wait, for a step and for a checkpoint. The second one would report the
            # ranks that `close` ends here, so the first failure is stored.
            self._first_failure = self._first_failure or (lost, rank)
            self.close()
            raise self._failure(*self._first_failure) from lost
        raise error

    def _failure(self, lost: Exception, rank: int) -> TrainError:
        """Return the error to raise for an error of Ray, which came instead of `rank`'s answer."""
        import ray

        reason = str(lost).strip().splitlines()[0]
        if not isinstance(lost, _deaths()):
            return TrainError(f"Ray has lost an answer of rank {rank} of the trainer: {reason}")
        if isinstance(lost, ray.exceptions.RayActorError):
            ids = [actor._actor_id.hex() for actor in self._ranks]
            rank = ids.index(lost.actor_id) if lost.actor_id in ids else rank
        place = f": {self._places[rank]}" if self._places else ""
        return LostRankError(
            f"rank {rank} of the trainer has died{place} ({reason})", hints=DEATH_HINTS
        )

    def _held_mb(self) -> float:
        return float(sum(self._answers([rank.rss_mb.remote() for rank in self._ranks])))


def _deaths() -> tuple[type[Exception], ...]:
    """Return Ray's errors for a process or a machine that has died."""
    from ray import exceptions as errors

    # An answer is stored on its rank's machine, and is lost with it.
    machine = (errors.NodeDiedError, errors.LocalRayletDiedError, errors.ObjectLostError)
    return (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError, *machine)


class _Rank:
    """The actor of a rank; except for `written`, its calls run one after another."""

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
        """Wait until the checkpoint in progress is written; return the error, if any."""
        return self._written.get()
