"""Landlock: file system rules for sandboxes that cannot make private mounts (Linux 5.13)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from . import kernel

TRUNCATE_VERSION = 3
"""From this ABI on, truncating a file by its path needs a right."""

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _READ_DIR = 1, 2, 4, 8
_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL = (1 << 16) - 1  # from ABI 5 on
_TCP = 3
_SCOPES = 3  # abstract sockets and signals


def version() -> int:
    """Return the kernel's Landlock ABI; raises `OSError` if it has none."""
    return kernel.syscall("landlock_create_ruleset", _CREATE, None, 0, 1)


def restrict(abi: int, *, readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow this process and its children only these trees, for good. Needs no_new_privs."""
    handled = _BY_ABI.get(abi, _ALL)
    attributes = struct.pack("=Q", handled)
    if abi >= 4:
        attributes += struct.pack("=Q", _TCP)
    if abi >= 6:
        attributes += struct.pack("=Q", _SCOPES)
    ruleset = kernel.syscall("landlock_create_ruleset", _CREATE, attributes, len(attributes), 0)
    try:
        for path in readable:
            _allow(ruleset, path, _EXECUTE | _READ | _READ_DIR)
        for path in writable:
            _allow(ruleset, path, handled)
        kernel.syscall("landlock_restrict_self", _RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a missing path needs no rule
    try:
        if not os.path.isdir(path):
            access &= _EXECUTE | _WRITE | _READ
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, fd))
        kernel.syscall("landlock_add_rule", _ADD_RULE, ruleset, 1, rule, 0)
    finally:
        os.close(fd)
