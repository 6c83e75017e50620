"""Joins the ranks of a trainer to one process group, within a stated time.

Left to itself, torch waits for 10 to 30 minutes and does not say for whom. Here each rank first
tells the others where it is, through the store that they all meet at; then it connects, and one
small reduction proves that data flows.
"""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """The place and the time by which the ranks of a group meet, as one of them sees it."""

    url: str
    """`tcp://HOST:PORT`, at which rank 0 listens, or `file://PATH` on one machine."""
    rank: int
    size: int
    timeout_s: float
    """For everything: until all ranks are there, and until they are connected."""
    setting: str = "trainer.connect_timeout_s"
    """The name of the setting that has the timeout."""

    def join(self, backend: str, devices: Sequence[torch.device | str]) -> None:
        """Make `torch.distributed`'s default group; a reduction on each device proves it.

        Raises:
            TrainError: a rank did not come in time, or cannot be reached; names it, and its host.
        """
        deadline_s = time.monotonic() + self.timeout_s
        # torch keeps the one that listens as long as the group lives: further groups need it. Ours
        # is another connection, for each serves one thread at a time.
        store = self._open_store(listens=self.rank == 0)
        ours = PrefixStore("areal-gym", self._open_store(listens=False))
        self._find_all(ours, deadline_s)
        # In the thread that looks after the devices, for each thread has a current one.
        placed = [torch.zeros(1, device=device) for device in devices]

        def connect() -> None:
            torch.distributed.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.size
            )
            for tensor in placed:
                torch.distributed.all_reduce(tensor)
                tensor.item()  # waits for the device
            ours.set(f"connected/{self.rank}", "")

        try:
            is_connected = _finishes(connect, deadline_s - time.monotonic())
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise self._error(f"could not connect to the others: {reason}") from error
        if not is_connected:
            late = [rank for rank in range(self.size) if not _has(ours, f"connected/{rank}")]
            raise self._error(
                f"the ranks found each other, but did not connect within {self.timeout_s:g} s; "
                f"not connected: {self._places(ours, late)}"
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

    def _find_all(self, store: Store, deadline_s: float) -> None:
        store.set(f"rank/{self.rank}", json.dumps({"host": _host(), "pid": os.getpid()}))
        keys = [f"rank/{rank}" for rank in range(self.size)]
        try:
            left_s = max(0.01, deadline_s - time.monotonic())
            store.wait(keys, timedelta(seconds=left_s))
        except RuntimeError as error:
            try:
                missing = [rank for rank, key in enumerate(keys) if not _has(store, key)]
                there = self._places(store, [r for r in range(self.size) if r not in missing])
            except RuntimeError:  # rank 0 has given up and is gone
                raise self._error(f"rank 0, at {self.url}, went away") from error
            names = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if missing[_SHOWN:] else "")
            raise self._error(
                f"{counted(len(missing), 'rank')} ({names}) did not come to {self.url} within "
                f"{self.timeout_s:g} s; there are: {there}"
            ) from error

    def _places(self, store: Store, ranks: Sequence[int]) -> str:
        """Return ranks with their hosts and processes, as they have told."""
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
    """Call a function in a thread, which is given up after a time; raise what it raises."""
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
