"""A private root directory: read-only binds of what snippets may read, and a small tmpfs."""

from __future__ import annotations

import os
import sys

from . import kernel

_STAGE = "/sys"  # any directory that the jail hides; mounted over in our own namespace only
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_TMP_OPTIONS = "size=64m,nr_inodes=4096,mode=1777"


def build_root(readable: list[str], writable: str) -> None:
    """Move this process to a new mount namespace with a root of the `readable` paths.

    `writable` is a directory for `mount_writable`, which is tried once here.
    """
    kernel.unshare(kernel.NEWNS)
    kernel.mount("none", "/", "", kernel.REC | kernel.PRIVATE)
    kernel.mount("none", _STAGE, "tmpfs", kernel.NOSUID | kernel.NODEV, "mode=755,size=1m")
    for path in readable:
        _bind(path, is_device=path in _DEVICES)
    os.makedirs(_STAGE + writable, 0o1777)
    kernel.pivot_root(_STAGE)
    kernel.restrict_mount("/", kernel.RDONLY, recursive=False)
    mount_writable(writable)


def mount_writable(directory: str) -> None:
    """Mount a private file system of limited size on `directory`."""
    flags = kernel.NOSUID | kernel.NODEV
    kernel.mount("none", directory, "tmpfs", flags, _TMP_OPTIONS)


def readable_paths(paths: list[str]) -> list[str]:
    """Return the system, the interpreter and `paths`: outer directories first, none twice."""
    prefixes = [sys.base_prefix, sys.base_exec_prefix, *paths]
    chosen: list[str] = []
    for path in [*_SYSTEM, *sorted(prefixes, key=len), *_SYSTEM_FILES, *_DEVICES]:
        path = os.path.abspath(path)
        inside = any(path == other or path.startswith(other + "/") for other in chosen)
        if path != "/" and not inside and os.path.exists(path):
            chosen.append(path)
    return chosen


def _bind(path: str, *, is_device: bool) -> None:
    target = _STAGE + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(path, target, "", kernel.BIND | kernel.REC)
    # A read-only device can still be written to: only its times cannot be set.
    restrictions = kernel.RDONLY | kernel.NOSUID | (0 if is_device else kernel.NODEV)
    kernel.restrict_mount(target, restrictions, recursive=not is_device)
