"""Servers and trainer take turns on the same GPUs (`trainer.colocate`).

episodes are played            the trainer's weights and states are in host memory
engine.sleep, trainer.reload   requests wait; the servers release their memory
the step
publication                    the servers' weights are in memory again, but not their caches
trainer.offload, wake_up       requests continue where they stopped, under the new weights
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from areal_gym.engines.base import Engine, SleepingEngine
from areal_gym.errors import ConfigError
from areal_gym.trainer.base import OffloadingTrainer, Trainer

InTrainerThread = Callable[[Callable[[], None]], Awaitable[None]]


class SharedGpus:
    """Passes the GPUs between a trainer and an engine; `share_with` adds the engine.

    Args:
        trainer: has the GPUs at first.
        call: calls a method of the trainer in its thread (`TrainerThread.call`).
        keeps_weights: whether the servers keep their weights, because adapters are published.

    Raises:
        ConfigError: the trainer cannot be offloaded.
    """

    def __init__(
        self, trainer: Trainer[Any], call: InTrainerThread, *, keeps_weights: bool
    ) -> None:
        if not isinstance(trainer, OffloadingTrainer):
            raise ConfigError(
                f"trainer.colocate = true, and {type(trainer).__name__} cannot be offloaded",
                hints=["its class lacks offload() and reload()", "or: trainer.colocate=false"],
            )
        self._trainer = trainer
        self._call = call
        self._keeps_weights = keeps_weights
        self._engine: SleepingEngine | None = None

    def share_with(self, engine: Engine) -> None:
        """Share the GPUs with this engine, which has started.

        Raises:
            ConfigError: its servers cannot release their memory.
        """
        if not isinstance(engine, SleepingEngine):
            raise ConfigError(
                f"trainer.colocate = true needs an engine with servers that release their memory, "
                f"and {type(engine).__name__} has none",
                hints=["use engine.id=sglang or engine.id=vllm", "or: trainer.colocate=false"],
            )
        engine.require_sleep()
        self._engine = engine

    async def give_to_trainer(self) -> None:
        """Put the servers to sleep, and move the trainer back to its GPUs."""
        if self._engine is not None and not self._engine.is_asleep:
            await self._engine.sleep(keeps_weights=self._keeps_weights)
        await self._call(self._trainer.reload)

    async def give_to_servers(self) -> None:
        """Offload the trainer, and wake the servers up; new weights were published before."""
        await self._call(self._trainer.offload)
        if self._engine is not None:
            await self._engine.wake_up()
