"""The two halves of an update: the trainer's step, and the publication of its weights.

    TrainerThread.call(trainer.step)  --weights-->  WeightPublisher.publish(version + 1)
      in its own thread, while                        waits for the engine's next
      rollouts continue                               pause between two tokens

`areal_gym.runs.train` calls one after the other, in synchronous and asynchronous training alike.
The source of rollouts decides how far they run ahead (`rollout.max_staleness`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from areal_gym.engines.base import (
    Engine,
    InterruptedEngine,
    ReferenceScores,
    RejoinedEngine,
    VerifyingEngine,
)
from areal_gym.errors import EngineError, InfrastructureError
from areal_gym.trainer.base import GroupTrainer, WeightSync
from areal_gym.trainer.colocation import SharedGpus
from areal_gym.trainer.weight_sync import weights_for

_T = TypeVar("_T")
_POLL_S = 1.0
"""Seconds between two checks of an engine that has lost its servers."""


class TrainerThread:
    """Runs the calls of a trainer (or teacher) one after another in a thread.

    torch's number of threads is set for the calling thread only, hence the initializer.
    """

    def __init__(self, num_threads: int = 1, name: str = "trainer") -> None:
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix=f"areal-gym-{name}",
            initializer=torch.set_num_threads,
            initargs=(num_threads,),
        )

    async def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run `function` in the trainer's thread and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        """End the thread after the current call."""
        self._thread.shutdown()


class WeightPublisher:
    """Publishes a trainer's weights to an engine, which may lose its servers for a while.

    Args:
        weight_sync: publishes the weights.
        trainer: has the weights.
        engine: the engine that gets them.
        outage_patience_s: how long a publication waits for a server to come back.
        gpus: the GPUs that servers and trainer share, if they do.
        make_reference: returns, for a version, the log-probabilities that servers are compared
            with, if the engine compares them.
    """

    def __init__(
        self,
        weight_sync: WeightSync,
        trainer: GroupTrainer,
        engine: Engine | None = None,
        outage_patience_s: float = 0.0,
        gpus: SharedGpus | None = None,
        make_reference: Callable[[int], ReferenceScores | None] | None = None,
    ) -> None:
        self._weight_sync = weight_sync
        self._trainer = trainer
        self._engine = engine
        self._patience_s = outage_patience_s
        self._gpus = gpus
        self._make_reference = make_reference

    async def begin_step(self) -> None:
        """Give shared GPUs to the trainer."""
        if self._gpus is not None:
            await self._gpus.give_to_trainer()

    async def end_turn(self, version: int) -> None:
        """Give shared GPUs back to the servers without a step; `version` is the weights'."""
        if self._gpus is not None:
            await self.publish(version)

    async def publish(self, version: int) -> None:
        """Publish the weights; if all servers are lost, publish again when one is back.

        Afterwards, GPUs that the trainer shares with the servers are the servers'.

        Raises:
            EngineError: no server took the weights.
            InfrastructureError: no server came back in time.
        """
        clock = asyncio.get_running_loop().time
        since_s = clock()
        await self._update_reference(version)
        while True:
            try:
                await self._publish_once(version)
                return
            except EngineError as error:
                engine = self._engine
                if not isinstance(engine, InterruptedEngine) or engine.outage_s == 0.0:
                    raise
                if (waited_s := clock() - since_s) >= self._patience_s:
                    raise InfrastructureError(
                        f"version {version} could not be published: waited {waited_s:.0f} s for "
                        f"servers (rollout.outage_patience_s = {self._patience_s:g}); "
                        f"{error.message}",
                        hints=error.hints,
                    ) from error
            await asyncio.sleep(_POLL_S)

    async def _update_reference(self, version: int) -> None:
        """Score the reference row once per version, while the trainer has its weights."""
        engine, make_reference = self._engine, self._make_reference
        if make_reference is None or not isinstance(engine, VerifyingEngine):
            return
        if engine.reference is None or engine.reference.version != version:
            engine.reference = await asyncio.to_thread(make_reference, version)

    async def _publish_once(self, version: int) -> None:
        try:
            weights = weights_for(self._weight_sync, self._trainer)
            await self._weight_sync.publish(weights, version)
        finally:
            if self._gpus is not None:  # after a failure, too: servers that restart need the memory
                await self._gpus.give_to_servers()

    async def publish_while(self, work: Coroutine[Any, Any, _T], version: int) -> _T:
        """Return the result of `work`; meanwhile, publish again to servers that come back."""
        engine = self._engine
        if not isinstance(engine, RejoinedEngine):
            return await work
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_POLL_S)
                if engine.needs_weights and not task.done():
                    await self.publish(version)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
