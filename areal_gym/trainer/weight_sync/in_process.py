"""Publishes weights to an engine in this process."""

from __future__ import annotations

from pathlib import Path

from areal_gym.engines.base import Engine, LocalEngine
from areal_gym.errors import ConfigError
from areal_gym.trainer.base import Weights


class InProcessWeightSync:
    """Passes the tensors to an engine in this process, which copies them: no disk, no network.

    Raises:
        ConfigError: the engine has servers.
    """

    def __init__(self, engine: Engine, *, directory: Path | None = None) -> None:
        if not isinstance(engine, LocalEngine):
            raise ConfigError(
                "trainer.weight_sync=in-process needs an engine in this process",
                hints=["servers get their weights by disk, tensor or distributed"],
            )
        self._engine = engine

    async def publish(self, weights: Weights, version: int) -> None:
        """Copy the weights into the engine."""
        await self._engine.publish(weights, version)

    async def aclose(self) -> None:
        """Do nothing: this weight sync holds no resources."""
