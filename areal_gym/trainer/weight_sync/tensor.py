"""Sends weights in requests: as memory handles to servers of this machine, else by value."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_gym.engines.base import Engine, ServerListEngine
from areal_gym.errors import EngineError
from areal_gym.models.device import finish_work, own_gpu, release_shared_memory, visible_gpu
from areal_gym.trainer.base import Weights
from areal_gym.trainer.weight_sync.base import require_remote, sent_type, update_session
from areal_gym.trainer.weight_sync.flat_buckets import FlatBucket, flat_buckets
from areal_gym.trainer.weight_sync.local_servers import find_local_server, is_descendant
from areal_gym.trainer.weight_sync.memory_handles import (
    handle_of,
    host_buffer,
    prepare_host_buffers,
)
from areal_gym.trainer.weight_sync.pickled_buckets import encoded
from areal_gym.trainer.weight_sync.rank_posts import Body, on_each, request, server_info
from areal_gym.trainer.weight_sync.rank_tasks import OneAhead, RankSide, run_task

_TRANSFER_S = 600.0


class TensorWeightSync:
    """Sends tensors in buckets of limited size, one request each (SGLang's `flattened_bucket`).

    Where possible, the request has only a handle of memory that the server's workers open. On GPUs
    that ranks and servers share (`trainer.colocate`) it is a CUDA IPC handle, from each rank to the
    worker on its GPU. For other servers that this run started on rank 0's machine, it is a handle
    of the host's shared memory.

    Otherwise rank 0 sends the values. They are encoded once, and repeated in the request for each
    tensor-parallel worker of a server, which reads its own copy only. With many workers, `delta` or
    `distributed` send less.

    Args:
        engine: an engine with servers.
        directory: not used.
        bucket_mb: the size of a bucket in 10^6 bytes. Two are in memory, and about two more when
            values are sent.
        dtype: the type that is sent ("bfloat16" halves it); by default that of the weights.
        handles: whether handles may be sent instead of values.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        directory: Path | None = None,
        bucket_mb: float = 32,
        dtype: str | None = None,
        handles: bool = True,
    ) -> None:
        self._engine = require_remote(engine, "tensor")
        self._bucket_bytes = int(bucket_mb * 1e6)
        self._dtype = sent_type(dtype)
        self._driver = os.getpid() if handles else None
        self._kept: dict[str, Any] = {}
        urls = engine.server_urls if handles and isinstance(engine, ServerListEngine) else ()
        if any(server.is_below(os.getpid()) for server in map(find_local_server, urls) if server):
            prepare_host_buffers()  # before episodes are played

    async def publish(self, weights: Weights, version: int) -> None:
        """Interrupt generation, send bucket by bucket to all servers at once, resume.

        Raises:
            EngineError: no server took the weights.
        """
        async with (
            self._engine.updating(version) as servers,
            update_session(servers, version) as alive,
        ):
            urls = tuple(server.url for server in alive)
            task = _Post(urls, version, self._bucket_bytes, self._dtype, self._driver)
            failed = await asyncio.to_thread(run_task, weights, task, self._kept)
            alive[:] = [server for server in alive if server.url not in failed]

    async def aclose(self) -> None:
        """Do nothing: this weight sync holds no resources."""


@dataclass(slots=True)
class _Routes:
    """How each server gets the weights; a server that is in neither set gets values."""

    num_workers: dict[str, int] = field(default_factory=dict)
    by_gpu: dict[str, list[int]] = field(default_factory=dict)
    """The servers that open GPU memory, with the rank on the GPU of each of their workers."""
    by_memory: set[str] = field(default_factory=set)
    """The servers that open the host's shared memory."""
    failures: dict[str, EngineError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Post:
    """The rank task that sends the weights; returns the servers that failed.

    Raises:
        EngineError: all servers failed; this is the first one's error.
    """

    urls: tuple[str, ...]
    version: int
    bucket_bytes: int
    dtype: torch.dtype | None
    driver: int | None
    """The process that drives the run, and whose servers end with it; None forbids handles."""

    def __call__(self, side: RankSide) -> list[str]:
        """Gather the weights in every rank, and send them from the first."""
        routes = self._routes(side)
        if side.ranks.rank and not routes.by_gpu:
            for _ in side.weights(self.dtype):
                pass  # gathering is collective
            side.agree(None)
            return []
        allocate = host_buffer if routes.by_memory and not routes.by_gpu else None
        sending, device = OneAhead(), None
        for bucket in flat_buckets(side.weights(self.dtype), self.bucket_bytes, allocate):
            # After this, other ranks may refill the buffers of the bucket that was sent last.
            sending.wait()
            handles = self._gpu_handles(side, routes, bucket)
            if side.ranks.rank == 0:
                sending.run(self._send, bucket, routes, handles)
            device = bucket.flat.device
        side.agree(sending.close())
        if routes.by_gpu and device is not None:
            release_shared_memory(device)
        return list(routes.failures)

    def _routes(self, side: RankSide) -> _Routes:
        gpus = side.gather(own_gpu() if self.driver is not None else None)
        routes = _Routes()
        if side.ranks.rank == 0:
            infos, routes.failures = on_each(self.urls, server_info)
            for url, info in infos.items():
                routes.num_workers[url] = int(info.get("tp_size") or 1)
                if self.driver is not None:
                    self._find_route(routes, url, info, gpus)
        return side.gather(routes)[0] if any(gpus) else routes

    def _find_route(
        self, routes: _Routes, url: str, info: dict[str, Any], gpus: list[str | None]
    ) -> None:
        assert self.driver is not None
        server = find_local_server(url)
        if server is None:
            return
        first, step = int(info.get("base_gpu_id") or 0), int(info.get("gpu_id_step") or 1)
        numbers = range(first, first + step * routes.num_workers[url], step)
        needed = [visible_gpu(server.environment, number) for number in numbers]
        if all(gpu is not None and gpu in gpus for gpu in needed):
            routes.by_gpu[url] = [gpus.index(gpu) for gpu in needed]
        elif is_descendant(self.driver) and server.is_below(self.driver):
            routes.by_memory.add(url)

    def _gpu_handles(
        self, side: RankSide, routes: _Routes, bucket: FlatBucket
    ) -> dict[tuple[str, int], bytes]:
        """Return all ranks' handles of a bucket, by (server, worker)."""
        if not routes.by_gpu:
            return {}
        finish_work(bucket.flat.device)
        mine = {
            (url, worker): handle_of(bucket, bucket.flat)
            for url, ranks in routes.by_gpu.items()
            for worker, rank in enumerate(ranks)
            if rank == side.ranks.rank
        }
        return {key: handle for part in side.gather(mine) for key, handle in part.items()}

    def _send(
        self, bucket: FlatBucket, routes: _Routes, handles: dict[tuple[str, int], bytes]
    ) -> None:
        failures = routes.failures
        urls = [url for url in self.urls if url not in failures]
        in_memory = self._in_memory(bucket.flat) if routes.by_memory.intersection(urls) else None
        by_memory = routes.by_memory if in_memory is not None else set()
        values = list(encoded(bucket)) if set(urls) - by_memory - routes.by_gpu.keys() else []

        def send(url: str) -> None:
            workers = range(routes.num_workers[url])
            if url in routes.by_gpu:
                payloads = [[handles[url, worker]] for worker in workers]
            elif url in by_memory and in_memory is not None:
                payloads = [[handle_of(bucket, in_memory)] for _ in workers]
            else:
                payloads = [values for _ in workers]
            body = self._body(payloads, bucket.is_last)
            request("POST", url, "/update_weights_from_tensor", body, timeout_s=_TRANSFER_S)

        _, failed = on_each(urls, send)
        failures.update(failed)
        if len(failures) == len(self.urls):
            raise next(iter(failures.values()))

    def _in_memory(self, flat: Tensor) -> Tensor | None:
        """Return a bucket's bytes in shared memory; None if there is no room."""
        if flat.device.type != "cpu":
            flat = host_buffer(len(flat)).copy_(flat)
        return flat if flat.is_shared() else None

    def _body(self, payloads: list[list[bytes]], is_last: bool) -> Body:
        fields: dict[str, Any] = {"load_format": "flattened_bucket", "flush_cache": is_last}
        if is_last:
            fields["weight_version"] = str(self.version)
        pieces = [b'{"serialized_named_tensors": ']
        for number, payload in enumerate(payloads):
            pieces += [b', "' if number else b'["', *payload, b'"']
        return Body([*pieces, b"], " + json.dumps(fields).encode()[1:]])
