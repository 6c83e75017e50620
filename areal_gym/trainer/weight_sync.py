"""How new weights reach the engine that samples with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from areal_gym.engines.base import LocalEngine

__all__ = ["InProcessWeightSync", "WeightSync"]


class WeightSync(Protocol):
    """Publishes weights under a version."""

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Returns when the engine samples with the new weights."""
        ...


class InProcessWeightSync:
    """The engine lives in this process and copies the tensors itself: no disk, no network."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the weights into the engine."""
        await self._engine.publish(weights, version)
