"""System calls that are missing from Python's standard library.

Every function raises `OSError` when the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import platform

NEWNS, NEWUTS, NEWIPC = 0x00020000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET, NEWCGROUP = 0x10000000, 0x20000000, 0x40000000, 0x02000000
RDONLY, NOSUID, NODEV, BIND, REC, PRIVATE, DETACH = 1, 2, 4, 4096, 16384, 1 << 18, 2
NOEXEC = 8
_NO_LINKS_BENEATH = 0x02 | 0x04 | 0x10  # RESOLVE_NO_MAGICLINKS, NO_SYMLINKS, IN_ROOT

_libc = ctypes.CDLL(None, use_errno=True)
# The number that differs; numbers from 424 on are the same everywhere.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _OPENAT2 = 442, 437
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000


def _check(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    """Make the raw call `number`; integers are passed as longs, bytes and buffers as pointers."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *wide), name)


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags`."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace behind `fd`."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    arguments = [text.encode() or None for text in (source, target, kind)]
    flags_long = ctypes.c_ulong(flags)
    _check(_libc.mount(*arguments, flags_long, options.encode() or None), f"mount {target}")


def umount(target: str, flags: int) -> None:
    """Call umount2(2)."""
    _check(_libc.umount2(target.encode(), flags), f"umount {target}")


def restrict_mount(target: str, flags: int, *, recursive: bool) -> None:
    """Add `flags` (RDONLY, NOSUID, NODEV) to a mount, and to those under it (Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    at = _AT_RECURSIVE if recursive else 0
    path = target.encode()
    syscall("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, path, at, attributes, 32)


def open_beneath(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open `path` as if the directory behind `root` were "/", following no link (Linux 5.6)."""
    how = (ctypes.c_uint64 * 3)(flags | os.O_CLOEXEC, mode, _NO_LINKS_BENEATH)
    return syscall(f"openat2 {path}", _OPENAT2, root, os.fsencode(path), how, 24)


def pivot_root(new: str) -> None:
    """Make the mount `new` the root, and unmount the old one."""
    os.chdir(new)
    syscall("pivot_root", _PIVOT_ROOT[platform.machine()], b".", b".")
    umount(".", DETACH)
    os.chdir("/")


def prctl(option: int, value: int = 0, extra: object = None) -> int:
    """Call prctl(2) with up to two arguments."""
    return _check(_libc.prctl(option, ctypes.c_ulong(value), extra, 0, 0), f"prctl {option}")


def capabilities() -> int:
    """Return the effective capabilities, as a bit mask."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("CapEff"))
    return int(line.split()[1], 16)


def drop_capabilities(*, keep: int = 0, bounding: int = 0) -> None:
    """Drop every capability but those in the bit mask `keep`.

    A program that root executes may have those in `bounding`; by default none.
    """
    for capability in range(64):
        if bounding >> capability & 1:
            continue
        try:
            prctl(24, capability)  # PR_CAPBSET_DROP
        except OSError:
            break  # past the last one; or not allowed, and then there is none to drop
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    # Effective, permitted, inheritable; the high halves follow.
    sets = (ctypes.c_uint32 * 6)(keep, keep, 0, keep >> 32, keep >> 32, 0)
    _check(_libc.capset(header, sets), "capset")
