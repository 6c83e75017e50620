"""Sends weights in the body of requests: no shared file system, no process group."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from areal_gym.engines.base import Engine
from areal_gym.errors import EngineError
from areal_gym.trainer.base import Weights
from areal_gym.trainer.weight_sync.base import require_remote, sent_type, update_session
from areal_gym.trainer.weight_sync.flat_buckets import FlatBucket, flat_buckets
from areal_gym.trainer.weight_sync.rank_posts import Body, num_workers, on_each, request
from areal_gym.trainer.weight_sync.rank_tasks import OneAhead, RankSide, run_task

_TRANSFER_S = 600.0
_PIECE_BYTES = 3 * 2**18
"""Encoded at a time: base64 holds Python's lock, and other threads wait. Divisible by 3."""


class TensorWeightSync:
    """Sends tensors in buckets of limited size, one request each (SGLang's `flattened_bucket`).

    Rank 0 of the trainer sends them, by value: SGLang's alternative, handles of shared memory,
    crashes a server that is not a child of the sender. A bucket is encoded once. On the wire it is
    repeated for each tensor-parallel worker of a server, of which each reads its own copy only:
    with many, `delta` or `distributed` send less.

    Args:
        engine: an engine with servers.
        directory: not used.
        bucket_mb: the size of a bucket, in 10^6 bytes; about four copies are in memory. Pickling a
            bucket holds Python's lock, so that a trainer in a thread wants small ones.
        dtype: the type that is sent ("bfloat16" halves it); that of the weights by default.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        directory: Path | None = None,
        bucket_mb: float = 32,
        dtype: str | None = None,
    ) -> None:
        self._engine = require_remote(engine, "tensor")
        self._bucket_bytes = int(bucket_mb * 1e6)
        self._dtype = sent_type(dtype)
        self._kept: dict[str, Any] = {}

    async def publish(self, weights: Weights, version: int) -> None:
        """Interrupt generation, send bucket by bucket to all servers at once, resume.

        Raises:
            EngineError: no server took the weights.
        """
        async with self._engine.updating(version) as servers, update_session(servers) as alive:
            urls = tuple(server.url for server in alive)
            task = _Post(urls, version, self._bucket_bytes, self._dtype)
            failed = await asyncio.to_thread(run_task, weights, task, self._kept)
            alive[:] = [server for server in alive if server.url not in failed]

    async def aclose(self) -> None:
        """Do nothing: nothing is held."""


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

    def __call__(self, side: RankSide) -> list[str]:
        """Gather in every rank, and send from the first."""
        failures: dict[str, EngineError] = {}
        error = None
        if side.ranks.rank:
            for _ in side.weights(self.dtype):
                pass  # gathered with the others
        else:
            sizes, failures = on_each(self.urls, num_workers)
            sending = OneAhead()
            for bucket in flat_buckets(side.weights(self.dtype), self.bucket_bytes):
                sending.run(self._send, bucket, sizes, failures)
            error = sending.close()
        side.agree(error)
        return list(failures)

    def _send(
        self,
        bucket: FlatBucket,
        sizes: dict[str, tuple[int, int]],
        failures: dict[str, EngineError],
    ) -> None:
        fields = {"load_format": "flattened_bucket", "flush_cache": bucket.is_last}
        version = {"weight_version": str(self.version)} if bucket.is_last else {}
        payload = [b'"', *encoded(bucket), b'"']

        def send(url: str) -> None:
            again = [b",", *payload] * (sizes[url][0] - 1)  # for each tensor-parallel worker
            head = b'{"serialized_named_tensors": ['
            tail = b"], " + json.dumps({**fields, **version}).encode()[1:]
            body = Body([head, *payload, *again, tail])
            request("POST", url, "/update_weights_from_tensor", body, timeout_s=_TRANSFER_S)

        _, failed = on_each((url for url in self.urls if url not in failures), send)
        failures.update(failed)
        if len(failures) == len(self.urls):
            raise next(iter(failures.values()))


def encoded(bucket: FlatBucket) -> Iterator[bytes]:
    """Yield the pieces of a bucket as SGLang reads it: pickled and in base64.

    SGLang reads the metadata by attribute only, so they need not be of its own class, which the
    trainer does not have; plain namespaces pass its unpickler.
    """
    metadata = []
    start = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        end = start + shape.numel() * dtype.itemsize
        facts = {"name": name, "shape": shape, "dtype": dtype, "numel": end - start}
        metadata.append(SimpleNamespace(**facts, start_idx=start, end_idx=end))
        start = end
    stream = io.BytesIO()
    # A view would be pickled with all of the buffer that it is a part of.
    content = {"flattened_tensor": bucket.flat.cpu().clone(), "metadata": metadata}
    pickle.dump(content, stream, protocol=pickle.HIGHEST_PROTOCOL)
    with stream.getbuffer() as raw:
        for begin in range(0, len(raw), _PIECE_BYTES):
            yield base64.b64encode(raw[begin : begin + _PIECE_BYTES])
