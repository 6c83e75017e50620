"""Finds a server's process on this machine, to tell whether it can map this process's memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from areal_gym.errors import EngineError
from areal_gym.trainer.weight_sync.rank_posts import own_address

_PROC = Path("/proc")
_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server's process that runs torch as this user and sees the same files."""

    pid: int
    environment: Mapping[str, str]

    def is_below(self, pid: int) -> bool:
        """Return whether the server is a descendant of the process `pid`."""
        return pid in _ancestors(self.pid)


def find_local_server(url: str) -> LocalServer | None:
    """Return the process that listens at `url`; None unless it certainly shares memory with us.

    A tunnel or a proxy may listen here for another machine, but it has no torch; a container has
    other mounts; processes of other users, and systems without /proc, show nothing.
    """
    with suppress(OSError, EngineError):
        parts = urlsplit(url)
        if parts.hostname and own_address(url) in _addresses(parts.hostname):
            for pid in _listeners(parts.port or 80):
                if _has_same_view(pid):
                    return LocalServer(pid, _environment(pid))
    return None


def is_descendant(pid: int) -> bool:
    """Return whether this process is `pid` or a descendant of it."""
    with suppress(OSError):
        return pid in _ancestors(os.getpid())
    return False


def _addresses(host: str) -> set[str]:
    return {str(address[4][0]) for address in socket.getaddrinfo(host, None)}


def _listeners(port: int) -> Iterator[int]:
    """Yield the processes that listen at a port, among those that this user may inspect."""
    wanted = {f"socket:[{inode}]" for inode in _sockets(port)}
    for process in _PROC.iterdir() if wanted else ():
        if not process.name.isdigit():
            continue
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor) in wanted:
                        yield int(process.name)
                        break


def _sockets(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen at a port."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for row in (_PROC / "self/net" / table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _has_same_view(pid: int) -> bool:
    with suppress(OSError):
        process = _PROC / str(pid)
        spaces = all(
            os.readlink(process / "ns" / kind) == os.readlink(_PROC / "self/ns" / kind)
            for kind in ("mnt", "pid")
        )
        is_of_user = process.stat().st_uid in (os.geteuid(), 0)
        return spaces and is_of_user and "libtorch" in (process / "maps").read_text()
    return False


def _environment(pid: int) -> dict[str, str]:
    raw = (_PROC / str(pid) / "environ").read_bytes().decode(errors="surrogateescape")
    return dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)


def _ancestors(pid: int) -> list[int]:
    """Return a process and its ancestors."""
    pids = []
    while pid > 0:
        pids.append(pid)
        # The process's name, before this, may contain spaces and brackets.
        pid = int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return pids
