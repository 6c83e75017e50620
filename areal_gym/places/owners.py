"""Owners of places, as labels: whether the process that started a place is still alive."""

from __future__ import annotations

import os
import secrets
import socket
from functools import cache
from pathlib import Path


def new_owner() -> str:
    """Return a label for places of this process; no two calls return the same."""
    pid = os.getpid()
    return ":".join((*_machine(), str(pid), _started(pid), secrets.token_hex(4)))


def is_gone(owner: str) -> bool:
    """Return whether the process of a label has certainly ended.

    Of another machine, or of another container on this one, nothing is known.
    """
    parts = owner.split(":")
    if len(parts) != 6:
        return False
    host, boot, namespace, pid, started, _ = parts
    here = _machine()
    if host != here[0]:
        return False
    if boot != here[1]:
        return True  # the machine has started anew since
    return namespace == here[2] and _started(int(pid)) != started


@cache
def _machine() -> tuple[str, str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot, str(os.stat("/proc/self/ns/pid").st_ino)


def _started(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty when there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
