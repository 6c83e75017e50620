"""The ranks' side of a broadcast, in a process group of rank 0 and the servers' workers.

    rank 0 of the trainer  --flat bucket--> workers of server 1, workers of server 2, ...
    the other ranks gather with it; the process that drives the run opens and closes the update

`broadcast_wires` has the requests for each kind of server.
"""

from __future__ import annotations

import itertools
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from areal_gym.errors import EngineError, InfrastructureError
from areal_gym.models.process_groups import join_group
from areal_gym.trainer.weight_sync.broadcast_wires import BroadcastWire, wire_of
from areal_gym.trainer.weight_sync.flat_buckets import FlatBucket, flat_buckets
from areal_gym.trainer.weight_sync.rank_posts import (
    Body,
    on_each,
    own_address,
    request,
)
from areal_gym.trainer.weight_sync.rank_tasks import OneAhead, RankSide
from areal_gym.utils.http_servers.addresses import is_loopback, listen

_KEPT = "weight_sync.group"
_QUICK_S = 30.0


class OldGroupError(EngineError):
    """A broadcast failed in the group of an earlier publication; a new group may work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastOptions:
    """The arguments of `DistributedWeightSync`."""

    backend: str | None
    host: str | None
    bucket_bytes: int
    dtype: torch.dtype | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The rank task that broadcasts the weights to the servers.

    Raises:
        EngineError: a server did not join or receive; the group is left then.
    """

    urls: tuple[str, ...]
    protocol: str
    """The servers' protocol; all servers have the same."""
    version: int
    options: BroadcastOptions

    def __call__(self, side: RankSide) -> None:
        """Gather the weights in every rank, and send them from the first."""
        options = self.options
        if side.ranks.rank:
            for _ in side.weights(options.dtype):
                pass  # gathering is collective
            return side.agree(None)
        sending = OneAhead()
        was_kept = _KEPT in side.kept
        for bucket in flat_buckets(side.weights(options.dtype), options.bucket_bytes):
            sending.run(self._send, bucket, side.kept)
        error = sending.close()
        if error is not None:
            leave_group(side)
            if was_kept and isinstance(error, EngineError):
                error = OldGroupError(error.message, hints=error.hints)
        side.agree(error)

    def _send(self, bucket: FlatBucket, kept: dict[str, Any]) -> None:
        group: _Group | None = kept.get(_KEPT)
        if group is not None and group.urls != self.urls:
            group.leave()
            group = None
        if group is None:
            wire = wire_of(self.protocol)
            group = kept[_KEPT] = _Group.form(self.urls, wire, self.options, bucket.flat.device)
        group.send(bucket, self.version)


def leave_group(side: RankSide) -> None:
    """Leave the group of earlier publications, which also ends it on the servers: a rank task."""
    group: _Group | None = side.kept.pop(_KEPT, None)
    if group is not None:
        group.leave()


@dataclass(slots=True)
class _Group:
    """The process group of rank 0 and all workers of the servers."""

    urls: tuple[str, ...]
    wire: BroadcastWire
    name: str
    group: Any
    device: torch.device
    timeout_s: float

    @staticmethod
    def form(
        urls: tuple[str, ...], wire: BroadcastWire, options: BroadcastOptions, device: torch.device
    ) -> _Group:
        """Make the group together with the servers.

        Raises:
            EngineError: the group did not form; the message names missing ranks and the address.
        """
        backend = options.backend or dist.get_default_backend_for_device(device)
        host = options.host or _own_address(urls)
        timeout_s = options.timeout_s
        sizes, failures = on_each(urls, wire.num_workers)
        for failure in failures.values():
            raise failure
        *offsets, world_size = itertools.accumulate((sizes[url] for url in urls), initial=1)
        name, port = f"areal-gym-{uuid.uuid4().hex}", _free_port(host)

        def join() -> Any:
            return join_group(
                *(host, port),
                rank=0,
                world_size=world_size,
                name=name,
                backend=backend,
                timeout_s=timeout_s,
            )

        def invite(url: str, offset: int) -> Any:
            place = {"master_address": host, "master_port": port}
            ranks = {"rank_offset": offset, "world_size": world_size}
            body = wire.invitation({**place, **ranks}, name, backend, timeout_s)
            request("POST", url, wire.join_route, Body.of_json(body), timeout_s=timeout_s)

        members: dict[str, Callable[[], Any]] = {f"rank 0 (trainer, {socket.gethostname()})": join}
        for url, offset in zip(urls, offsets, strict=True):
            last = offset + sizes[url] - 1
            ranks = f"rank {offset}" if last == offset else f"ranks {offset} to {last}"
            members[f"{ranks} ({url})"] = partial(invite, url, offset)
        where = f"{backend} group of {world_size} ranks at {host}:{port}"
        group = _together(members, where, timeout_s)[0]
        group_device = torch.device("cpu") if backend == "gloo" else device
        return _Group(urls, wire, name, group, group_device, timeout_s)

    def send(self, bucket: FlatBucket, version: int) -> None:
        """Broadcast one bucket; return when every server has loaded it."""
        content = Body.of_json(self.wire.announcement(bucket, self.name, version))

        def receive(url: str) -> None:
            request("POST", url, self.wire.update_route, content, timeout_s=self.timeout_s)

        def broadcast() -> None:
            try:
                dist.broadcast(bucket.flat.to(self.device), src=0, group=self.group)
            except RuntimeError as error:
                raise EngineError(f"the broadcast of the weights failed: {error}") from error

        with ThreadPoolExecutor(1 + len(self.urls)) as threads:
            parts: list[Future[None]] = [threads.submit(receive, url) for url in self.urls]
            parts.append(threads.submit(broadcast))
            done, _ = wait(parts, return_when=FIRST_EXCEPTION)
            failed = [part for part in done if part.exception() is not None]
            if failed and self.device.type != "cpu":
                # gloo needs no abort: it ends by its own timeout, or when a connection breaks.
                self.group._get_backend(self.device).abort()
        for part in parts:
            part.result()

    def leave(self) -> None:
        """Leave the group, which also ends it on the servers."""
        group, self.group = self.group, None
        dist.destroy_process_group(group)
        content, route = Body.of_json({"group_name": self.name}), self.wire.leave_route
        # A server that has died has left already, so failures are ignored.
        on_each(self.urls, lambda url: request("POST", url, route, content, timeout_s=_QUICK_S))


def _own_address(urls: tuple[str, ...]) -> str:
    """Return this machine's address for the servers; prefer one that other machines can reach."""
    hosts = [own_address(url) for url in urls]
    return next((host for host in hosts if not is_loopback(host)), hosts[0])


def _together(members: dict[str, Callable[[], Any]], where: str, timeout_s: float) -> list[Any]:
    """Let all members join at once, and return their results; give up when the first one fails.

    The others end by their own timeouts, in threads that are not waited for.
    """
    results: dict[str, Any] = {}
    ended: SimpleQueue[tuple[str, Any]] = SimpleQueue()

    def join(name: str, act: Callable[[], Any]) -> None:
        try:
            ended.put((name, act()))
        except Exception as error:
            ended.put((name, error))

    for name, act in members.items():
        threading.Thread(target=join, args=(name, act), daemon=True).start()
    try:
        while len(results) < len(members):
            name, result = ended.get(timeout=timeout_s + _QUICK_S)
            results[name] = result
            if isinstance(result, Exception):
                raise _not_formed(where, timeout_s, f"{name}: {result}", members, results)
    except Empty:
        raise _not_formed(where, timeout_s, "no answer", members, results) from None
    return [results[name] for name in members]


def _not_formed(
    where: str, timeout_s: float, reason: str, members: dict[str, Any], results: dict[str, Any]
) -> EngineError:
    missing = [name for name in members if name not in results]
    waited = f"; not joined by then: {', '.join(missing)}" if missing else ""
    return EngineError(
        f"no process group with the servers: the {where} did not form within {timeout_s:g} s: "
        f"{reason}{waited}",
        hints=[
            "the servers must reach this address: trainer.weight_sync.kwargs.host=...",
            "servers that need longer: trainer.weight_sync.kwargs.timeout_s=...",
            "weights travel without a group with trainer.weight_sync=disk, tensor or delta",
        ],
    )


def _free_port(host: str) -> int:
    try:
        with listen(host, 0) as listener:
            return int(listener.getsockname()[1])
    except InfrastructureError as error:
        raise EngineError(
            f"rank 0 of the trainer, on {socket.gethostname()}: {error.message}",
            hints=["trainer.weight_sync.kwargs.host=ADDRESS, or leave it out"],
        ) from error
