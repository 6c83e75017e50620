"""Joins the ranks of a trainer to one process group, within a time limit.

torch by itself waits for 10 to 30 minutes and does not say for which rank. Here each rank first
announces its host in a store that all ranks can reach; then it connects, and a small reduction
proves that data flows.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from areal_gym.errors import TrainError
from areal_gym.utils.markup import counted

_SHOWN = 8  # the most ranks that an error lists
_TELLING_S = 5.0  # for how long rank 0 waits until the others have read who is missing


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """The address and the time limit with which one rank joins a process group."""

    url: str
    """`tcp://HOST:PORT`, at which rank 0 listens, or `file://PATH` on one machine."""
    rank: int
    size: int
    timeout_s: float
    """The limit for everything: until all ranks are present, and until they are connected."""
    setting: str = "trainer.connect_timeout_s"
    """The name of the setting with the timeout."""

    def join(self, backend: str, devices: Sequence[torch.device | str]) -> None:
        """Make `torch.distributed`'s default group, and test it by a reduction on each device.

        Raises:
            TrainError: a rank is missing or cannot be reached; the message names rank and host.
        """
        deadline_s = time.monotonic() + self.timeout_s
        # torch keeps the store that listens as long as the group lives, because further groups need
        # it. We use another connection, because each serves one thread at a time.
        store = self._open_store(listens=self.rank == 0)
        own_store = PrefixStore("areal-gym", self._open_store(listens=False))
        self._wait_for_ranks(own_store, deadline_s)
        # Made in this thread, which manages the devices, because the current device is per thread.
        probes = [torch.zeros(1, device=device) for device in devices]

        def connect() -> None:
            torch.distributed.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size
            )
            for tensor in probes:
                torch.distributed.all_reduce(tensor)
                tensor.item()  # waits for the device
            own_store.set(f"connected/{self.rank}", "")

        try:
            is_connected = _finishes(connect, deadline_s - time.monotonic())
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise self._error(f"could not connect to the others: {reason}") from error
        if not is_connected:
            late = [rank for rank in range(self.size) if not _has(own_store, f"connected/{rank}")]
            raise self._error(
                f"the ranks found each other, but did not connect within {self.timeout_s:g} s; "
                f"not connected: {self._places(own_store, late)}"
            )

    def _open_store(self, *, listens: bool) -> Store:
        address = urlsplit(self.url)
        if address.scheme == "file":
            return FileStore(address.path, self.size)
        assert address.hostname is not None
        assert address.port is not None
        try:
            return TCPStore(
                address.hostname,
                address.port,
                is_master=listens,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.timeout_s / 2),  # torch tries twice
            )
        except RuntimeError as error:
            does = "cannot listen" if self.rank == 0 else "does not reach rank 0"
            raise self._error(
                f"{does} at {self.url} within {self.timeout_s:g} s: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error

    def _wait_for_ranks(self, store: Store, deadline_s: float) -> None:
        store.set(f"rank/{self.rank}", json.dumps({"host": _host(), "pid": os.getpid()}))
        keys = [f"rank/{rank}" for rank in range(self.size)]
        try:
            try:
                store.wait(keys, timedelta(seconds=max(0.01, deadline_s - time.monotonic())))
            except RuntimeError:
                # The first that gives up names the missing ranks, and ends the others' waiting.
                missing = [rank for rank, key in enumerate(keys) if not _has(store, key)]
                if missing:  # else the last one came just now
                    store.compare_set("missing", "", json.dumps(missing))
                for rank in missing:
                    store.set(keys[rank], "")
            if not _has(store, "missing"):
                return
            missing = json.loads(store.get("missing"))
            present = [rank for rank in range(self.size) if rank not in missing]
            places = self._places(store, present)
            store.set(f"told/{self.rank}", "")
            if self.rank == 0:  # its store ends with it: the others read first
                with contextlib.suppress(RuntimeError):
                    store.wait([f"told/{rank}" for rank in present], timedelta(seconds=_TELLING_S))
        except RuntimeError as error:
            raise self._error(f"rank 0, at {self.url}, has ended") from error
        names = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if missing[_SHOWN:] else "")
        raise self._error(
            f"{counted(len(missing), 'rank')} ({names}) did not come to {self.url} within "
            f"{self.timeout_s:g} s; present: {places}"
        )

    def _places(self, store: Store, ranks: Sequence[int]) -> str:
        """Return the ranks with the hosts and processes that they announced."""
        shown = []
        for rank in ranks[:_SHOWN]:
            place = json.loads(store.get(f"rank/{rank}"))
            shown.append(f"rank {rank} on {place['host']}, process {place['pid']}")
        return "; ".join(shown) + (f"; {len(ranks) - _SHOWN} more" if ranks[_SHOWN:] else "")

    def _error(self, problem: str) -> TrainError:
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        given = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        is_local = self.url.startswith("file:")
        return TrainError(
            f"rank {self.rank} of {self.size}, on {_host()}: {problem}",
            hints=[
                None
                if is_local
                else "all hosts must reach each other at any port: does a firewall forbid it?",
                "name the interface of the network between the hosts: NCCL_SOCKET_IFNAME=eth0 for "
                f"GPUs, GLOO_SOCKET_IFNAME=eth0 for CPUs ({given or 'neither is set'}); "
                "NCCL_DEBUG=INFO tells more",
                f"slow to start? {self.setting}={2 * self.timeout_s:g} waits for twice as long",
            ],
        )


def _has(store: Store, key: str) -> bool:
    return bool(store.check([key]))


def _host() -> str:
    return socket.gethostname()


def _finishes(function: Callable[[], None], timeout_s: float) -> bool:
    """Call a function in a thread; return whether it ended in time, and raise what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="areal-gym-connect", daemon=True)
    thread.start()
    thread.join(max(0.01, timeout_s))
    if errors:
        raise errors[0]
    return not thread.is_alive()
