"""Broadcasts weights over a process group: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_gym.engines.base import BROKEN_WEIGHTS, Engine, WeightServer
from areal_gym.errors import EngineError
from areal_gym.trainer.base import Weights
from areal_gym.trainer.weight_sync.base import (
    on_all,
    require_remote,
    sent_type,
    update_session,
)
from areal_gym.trainer.weight_sync.broadcasting import (
    Broadcast,
    BroadcastOptions,
    OldGroupError,
    leave_group,
)
from areal_gym.trainer.weight_sync.rank_tasks import run_task

_QUICK_S = 30.0


class DistributedWeightSync:
    """Broadcasts weights from rank 0 of the trainer to all workers of all servers.

    The process group is made at the first publication, and again when servers join, leave or
    restart. Rank 0 holds two buckets: one is sent while the next is gathered.

    Args:
        engine: an engine with servers.
        directory: unused.
        backend: by default torch's for the weights' device: "nccl" on CUDA, "gloo" on CPUs.
        host: the address of rank 0 for the servers; by default that of the network interface
            towards them.
        bucket_mb: the size of the parts that a server receives and loads, in 10^6 bytes.
        dtype: the type that is sent ("bfloat16" halves it); by default that of the weights.
        timeout_s: a server that has not taken part by then has failed.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        directory: Path | None = None,
        backend: str | None = None,
        host: str | None = None,
        bucket_mb: float = 1000,
        dtype: str | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self._engine = require_remote(engine, "distributed")
        self._options = BroadcastOptions(
            backend=backend,
            host=host,
            bucket_bytes=int(bucket_mb * 1e6),
            dtype=sent_type(dtype),
            timeout_s=timeout_s,
        )
        self._kept: dict[str, Any] = {}
        self._weights: Weights | None = None

    async def publish(self, weights: Weights, version: int) -> None:
        """Interrupt generation, broadcast in the announced order, resume.

        If a server is lost meanwhile, those that still answer form a new group, and everything is
        sent again, because it is unknown what has arrived.

        Raises:
            EngineError: no server took the weights.
        """
        self._weights = weights
        async with self._engine.updating(version) as servers:
            left = list(servers)
            while left:
                try:
                    return await self._publish_to(left, weights, version)
                except EngineError as error:
                    answering = await _answering(left)
                    if len(answering) == len(left) and not isinstance(error, OldGroupError):
                        raise
                    # An iterator cannot be read a second time.
                    if not answering or iter(weights) is weights:
                        raise
                    left = answering

    async def _publish_to(
        self, servers: Sequence[WeightServer], weights: Weights, version: int
    ) -> None:
        async with update_session(servers, version) as alive:
            urls = tuple(server.url for server in alive)
            task = Broadcast(urls, alive[0].protocol, version, self._options)
            await asyncio.to_thread(run_task, weights, task, self._kept)

    async def aclose(self) -> None:
        """Leave the group, which also ends it on the servers."""
        weights, self._weights = self._weights, None
        if weights is not None:
            # Ranks that have died have left already.
            with contextlib.suppress(Exception):
                await asyncio.to_thread(run_task, weights, leave_group, self._kept)


async def _answering(servers: Sequence[WeightServer]) -> list[WeightServer]:
    """Return the servers that still answer, marked so that their partial weights are not used."""

    async def mark(server: WeightServer) -> None:
        try:
            async with asyncio.timeout(_QUICK_S):
                await server.set_version(BROKEN_WEIGHTS)
        except TimeoutError:
            raise EngineError(f"{server.url} gave no answer within {_QUICK_S:g} s") from None

    try:
        return await on_all(servers, mark)
    except EngineError:
        return []
