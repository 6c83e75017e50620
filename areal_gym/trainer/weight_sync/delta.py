"""Sends only changed weights, to a relay beside each server.

    rank r of the trainer --changes of its tensors--> relays --files--> servers (`weight_relay`)

An update changes the bytes of few bfloat16 weights. Each rank keeps its share of the bytes that
were sent last, and compares.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import torch
from torch import Tensor

from areal_gym.engines.base import Engine, ServerListEngine, WeightServer
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError
from areal_gym.trainer.base import Weights
from areal_gym.trainer.weight_sync.base import on_all, require_remote, sent_type
from areal_gym.trainer.weight_sync.rank_posts import Body, on_each, request
from areal_gym.trainer.weight_sync.rank_tasks import RankSide, run_task
from areal_gym.trainer.weight_sync.relays import Relays
from areal_gym.utils.changed_elements import as_bits, checksum, encode_changes

_QUICK_S = 30.0
_TRANSFER_S = 3600.0
_KEPT = "weight_sync.last_sent"
_TYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SentWeights:
    """Counts what one publication sent to the relays."""

    num_weights: int
    num_changed: int
    """Elements whose bytes differ from those sent last; all elements without a base."""
    num_bytes: dict[str, int]
    """The total size of all ranks' request bodies, by relay."""


class DeltaWeightSync:
    """Sends the changed bytes to relays, which keep files that the servers beside them load.

    Servers that the run started on this machine get a relay at the first publication; it ends with
    the run. On each other machine with servers, start one by hand:
    `python -m areal_gym.engines.weight_relay`.

    Relays receive the changes while generation continues; only loading interrupts it. The trainer's
    ranks keep the bytes that were sent last in host memory: two bytes per bfloat16 weight, divided
    among the ranks. A relay that misses a version, restarts or has other weights gets all weights.

    Args:
        engine: an engine with servers.
        directory: holds the files of a started relay if `/dev/shm` lacks the room.
        relay_port: the port of the relays on the servers' machines; if set, no relay is started.
        dtype: the type that is sent; in float32, each update changes nearly all weights.
        full_every: every this many publications, all weights are sent instead of changes.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        directory: Path | None = None,
        relay_port: int | None = None,
        dtype: str = "bfloat16",
        full_every: int = 50,
    ) -> None:
        remote = require_remote(engine, "delta")
        if not isinstance(remote, ServerListEngine):
            raise ConfigError(
                "trainer.weight_sync=delta needs an engine that lists its servers",
                hints=["trainer.weight_sync=disk"],
            )
        if full_every < 1:
            raise ConfigError(
                f"trainer.weight_sync.kwargs.full_every = {full_every} must be 1 or more",
                hints=["1 sends all weights each time"],
            )
        self._engine = remote
        self._relays = Relays(relay_port, directory)
        self._dtype = sent_type(dtype)
        self._full_every = full_every
        self._kept: dict[str, Any] = {}
        self._base: str | None = None
        """The id of the weights whose bytes the ranks keep."""
        self._num_since_full = 0
        self.last: SentWeights | None = None
        """What the latest publication sent."""

    async def publish(self, weights: Weights, version: int) -> None:
        """Bring the relays' files up to date, interrupt generation, load the files, resume.

        Raises:
            EngineError: no relay or no server took the weights.
        """
        relays = await asyncio.to_thread(self._relays.of, self._engine.server_urls)
        directories, failures = await asyncio.to_thread(self._send, set(relays.values()), weights)

        async def load(server: WeightServer) -> None:
            relay = relays[server.url]
            if relay in failures:
                raise failures[relay]
            # Not kept, because a server that comes back must not read files that change.
            await server.load_from_disk(Path(directories[relay]), version, is_kept=False)

        async with self._engine.updating(version) as servers:
            await on_all(servers, load)

    async def aclose(self) -> None:
        """End the relay that was started; other relays keep their files for the servers."""
        await asyncio.to_thread(self._relays.close)

    def _send(
        self, relays: set[str], weights: Weights
    ) -> tuple[dict[str, str], dict[str, EngineError]]:
        """Return the directories of relays that have the weights, and the errors of the others."""
        is_full = self._base is None or self._num_since_full + 1 >= self._full_every
        old, new = (None if is_full else self._base), uuid.uuid4().hex
        begun, failures = on_each(relays, partial(_begin, old=old, new=new))
        if not begun:
            raise self._unreachable(failures)
        self._base = None  # until the ranks have compared
        task = _SendShare(new, old, begun, self._dtype)
        self.last, num_parts, broken = run_task(weights, task, self._kept)
        self._base = new
        self._num_since_full = 0 if is_full else self._num_since_full + 1
        failures |= {relay: EngineError(message) for relay, message in broken.items()}
        commit = Body.of_json({"id": new, "num_parts": num_parts})

        def end(relay: str) -> str:
            answer = request("POST", relay, "/weights/commit", commit, timeout_s=_QUICK_S)
            return str(answer["directory"])

        directories, uncommitted = on_each(begun.keys() - failures.keys(), end)
        return directories, failures | uncommitted

    def _unreachable(self, failures: Mapping[str, EngineError]) -> EngineError:
        relay, error = next(iter(failures.items()))
        return EngineUnreachableError(
            f"no relay takes the weights: {error}",
            hints=[
                f"on the machine of {relay}: python -m areal_gym.engines.weight_relay "
                f"--directory /dev/shm/policy --host HOST --port {urlsplit(relay).port}",
                "without relays: trainer.weight_sync=disk, tensor or distributed",
            ],
        )


def _begin(relay: str, *, old: str | None, new: str) -> bool:
    """Begin a publication; return whether the relay accepts changes."""
    state = request("GET", relay, "/weights", timeout_s=_QUICK_S)
    takes_changes = old is not None and state.get("id") == old
    body = Body.of_json({"id": new, "base": old if takes_changes else None})
    request("POST", relay, "/weights/begin", body, timeout_s=_QUICK_S)
    return takes_changes


@dataclass(slots=True)
class _Sent:
    """A tensor as it was sent last."""

    dtype: str
    shape: list[int]
    bits: Any


@dataclass(slots=True)
class _Share:
    """One rank's tensors, as they were sent under an id."""

    id: str
    tensors: dict[str, _Sent] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _SendShare:
    """The rank task that compares this rank's share of the tensors, and sends it to the relays.

    Returns what was sent, the number of parts, and the relays that failed.
    """

    id: str
    base: str | None
    takes_changes: dict[str, bool]
    """Whether each relay accepts changes; the others get all weights."""
    dtype: torch.dtype | None

    def __call__(self, side: RankSide) -> tuple[SentWeights, int, dict[str, str]]:
        """Gather in every rank; each tensor belongs to the rank with the fewest bytes so far."""
        share: _Share | None = side.kept.get(_KEPT)
        if share is None or share.id != self.base:
            share = _Share("")
        changes = _Changes()
        error: Exception | None = None
        loads = [0] * side.ranks.size
        num_weights, names = 0, set()
        for name, tensor in side.weights(self.dtype):
            owner = loads.index(min(loads))
            loads[owner] += tensor.nbytes
            num_weights += tensor.numel()
            if owner != side.ranks.rank or error is not None:
                continue
            names.add(name)
            try:
                _compare(share, name, tensor, changes)
            except Exception as failed:
                error = failed
        if error is None and self.base is not None and (share.id != self.base or changes.is_other):
            error = EngineError("the trainer's tensors are not those that it sent before")
        side.kept.pop(_KEPT, None)
        side.agree(error)
        share.id = self.id
        side.kept[_KEPT] = share
        sizes, failures = self._post(side.ranks.rank, share, changes)
        results = side.gather((changes.num_changed, sizes, failures))
        broken = {relay: str(e) for _, _, failed in results for relay, e in failed.items()}
        num_bytes = {r: sum(sizes.get(r, 0) for _, sizes, _ in results) for r in self.takes_changes}
        num_changed = sum(number for number, _, _ in results)
        sent = SentWeights(num_weights=num_weights, num_changed=num_changed, num_bytes=num_bytes)
        return sent, side.ranks.size, broken

    def _post(
        self, number: int, share: _Share, changes: _Changes
    ) -> tuple[dict[str, int], dict[str, EngineError]]:
        """Send this rank's part to all relays; return the sizes of received parts, and failures."""
        whole = None if all(self.takes_changes.values()) else _whole(share)

        def send(relay: str) -> int:
            kind = "changes" if self.takes_changes[relay] else "whole"
            body = changes.body() if whole is None or kind == "changes" else whole
            query = urlencode({"id": self.id, "number": number, "kind": kind})
            request("POST", relay, f"/weights/part?{query}", body, timeout_s=_TRANSFER_S)
            return body.num_bytes

        return on_each(self.takes_changes, send)


@dataclass(slots=True)
class _Changes:
    """The differences between a rank's tensors and those sent last."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)
    num_changed: int = 0
    is_other: bool = False
    """Whether a tensor is new, or has another shape or type."""

    def body(self) -> Body:
        """Return the body of a request: a header and the changes."""
        return _body({"tensors": self.rows}, self.encoded)


def _compare(share: _Share, name: str, tensor: Tensor, changes: _Changes) -> None:
    """Keep a tensor's bytes, and record what has changed in them."""
    if tensor.dtype not in _TYPES:
        raise EngineError(
            f"{name} is of type {tensor.dtype}, which safetensors has no name for",
            hints=["trainer.weight_sync=distributed"],
        )
    kind, shape = _TYPES[tensor.dtype], list(tensor.shape)
    raw = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()
    bits = as_bits(raw, tensor.element_size())
    before = share.tensors.get(name)
    if before is None or (before.dtype, before.shape) != (kind, shape):
        share.tensors[name] = _Sent(kind, shape, bits.copy())
        changes.is_other = True
        changes.num_changed += len(bits)
        return
    num_changed, encoded = encode_changes(before.bits, bits)
    if num_changed:
        before.bits[:] = bits
        row = {"name": name, "num_changed": num_changed, "num_bytes": len(encoded)}
        changes.rows.append({**row, "sha256": checksum(bits)})
        changes.encoded.append(encoded)
        changes.num_changed += num_changed


def _whole(share: _Share) -> Body:
    """Return a rank's tensors as a safetensors file, with checksums in its metadata."""
    header: dict[str, Any] = {}
    pieces = []
    start = 0
    # Large elements first, so that each begins at a multiple of its size.
    for name, sent in sorted(share.tensors.items(), key=lambda item: -item[1].bits.itemsize):
        end = start + sent.bits.nbytes
        header[name] = {"dtype": sent.dtype, "shape": sent.shape, "data_offsets": [start, end]}
        if sent.bits.nbytes:
            pieces.append(memoryview(sent.bits.view(np.uint8)))
        start = end
    checksums = {name: checksum(sent.bits) for name, sent in share.tensors.items()}
    return _body({"__metadata__": checksums, **header}, pieces)


def _body(header: dict[str, Any], pieces: Sequence[bytes | memoryview]) -> Body:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return Body([head, *pieces], "application/octet-stream")
