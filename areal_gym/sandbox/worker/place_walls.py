"""The walls of a place: its root directory, its namespaces, and what its first process gives up.

The server's own mount namespace has a stage, where each place has a file system in memory of
limited size. On it lies the writable layer of an overlay over the image's layers. Nothing of it is
visible on the machine, and all of it ends with the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import struct
from typing import Any

from . import kernel, seccomp
from .limits import lower_limit

STAGE = "/sys"  # hidden in the server's own namespace only, after the control groups are open
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_HIDDEN = ("kcore", "keys", "timer_list", "sched_debug", "kmsg", "latency_stats")
_READ_ONLY = ("sys", "bus", "fs", "irq", "sysrq-trigger")
_NODE_BYTES = 8 << 10
_MIN_NODES = 16_384

# What package managers and tests need as root, over the place's own files and users only.
_CAPABILITIES = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5} | {
    "SETGID": 6,
    "SETUID": 7,
}
KEPT = sum(1 << number for number in _CAPABILITIES.values())

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def build_stage() -> int:
    """Move this process to a mount namespace of its own, with an empty stage.

    Returns a descriptor of a /proc with the numbers of this process's pid namespace.
    """
    kernel.unshare(kernel.NEWNS)
    kernel.mount("none", "/", "", kernel.REC | kernel.PRIVATE)
    kernel.mount("none", STAGE, "tmpfs", kernel.NOSUID | kernel.NODEV, "mode=700,size=16m")
    os.mkdir(f"{STAGE}/proc")
    kernel.mount("none", f"{STAGE}/proc", "proc", kernel.NOSUID | kernel.NODEV | kernel.NOEXEC)
    return os.open(f"{STAGE}/proc", os.O_RDONLY | os.O_DIRECTORY)


def mount_files(number: int, layers: list[str], storage_mb: int, owner: int, options: str) -> None:
    """Mount the files of a place: `layers` (topmost first) under an empty writable one."""
    place = f"{STAGE}/{number}"
    os.mkdir(place)
    nodes = max(_MIN_NODES, (storage_mb << 20) // _NODE_BYTES)
    flags = kernel.NOSUID | kernel.NODEV
    kernel.mount("none", place, "tmpfs", flags, f"size={storage_mb}m,nr_inodes={nodes},mode=755")
    for name in ("upper", "work", "root"):
        os.mkdir(f"{place}/{name}")
        os.chown(f"{place}/{name}", owner, owner)
    lower = ":".join(layers)
    directories = f"lowerdir={lower},upperdir={place}/upper,workdir={place}/work"
    kernel.mount("none", f"{place}/root", "overlay", flags, directories + options)


def unmount_files(number: int) -> None:
    """Remove the files of a place that has ended."""
    place = f"{STAGE}/{number}"
    for path in (f"{place}/root", place):
        with contextlib.suppress(OSError):
            kernel.umount(path, kernel.DETACH)
    with contextlib.suppress(OSError):
        os.rmdir(place)


def enter_place(number: int, shm_mb: int) -> None:
    """Move this process, the first of its pid namespace, to the root and namespaces of a place."""
    kernel.unshare(kernel.NEWNS | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP)
    root = f"{STAGE}/{number}/root"
    for name in ("proc", "dev", "sys", "tmp"):
        _make_directory(root, name)
    flags = kernel.NOSUID | kernel.NODEV | kernel.NOEXEC
    kernel.mount("none", f"{root}/proc", "proc", flags)
    _mount_devices(f"{root}/dev", shm_mb)
    for name in _HIDDEN:
        if os.path.exists(f"{root}/proc/{name}"):
            kernel.mount("/dev/null", f"{root}/proc/{name}", "", kernel.BIND)
    for name in _READ_ONLY:
        path = f"{root}/proc/{name}"
        if os.path.exists(path):
            kernel.mount(path, path, "", kernel.BIND | kernel.REC)
            kernel.restrict_mount(path, kernel.RDONLY | flags, recursive=True)
    socket.sethostname("place")
    raise_loopback()
    kernel.pivot_root(root)


def _make_directory(root: str, name: str) -> None:
    """Make a directory for a mount; an agent's link of that name is replaced, not followed."""
    path = f"{root}/{name}"
    if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
        os.unlink(path)
    if not os.path.lexists(path):
        os.mkdir(path)
        os.chmod(path, 0o1777 if name == "tmp" else 0o755)


def _mount_devices(dev: str, shm_mb: int) -> None:
    flags = kernel.NOSUID | kernel.NOEXEC
    kernel.mount("none", dev, "tmpfs", flags, "mode=755,size=64k,nr_inodes=64")
    for name in _DEVICES:
        os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        kernel.mount(f"/dev/{name}", f"{dev}/{name}", "", kernel.BIND)
        # Only its times and mode cannot be set.
        kernel.restrict_mount(f"{dev}/{name}", kernel.RDONLY | flags, recursive=False)
    for name, target in _LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    os.mkdir(f"{dev}/shm")
    os.mkdir(f"{dev}/pts")
    with contextlib.suppress(OSError):
        kernel.mount("none", f"{dev}/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=620")
        os.symlink("pts/ptmx", f"{dev}/ptmx")
    kernel.restrict_mount(dev, kernel.RDONLY, recursive=False)
    options = f"mode=1777,size={shm_mb}m,nr_inodes=4096"
    kernel.mount("none", f"{dev}/shm", "tmpfs", flags | kernel.NODEV, options)


def raise_loopback() -> None:
    """Switch on the interface `lo` of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        state = struct.unpack("16sh14x", fcntl.ioctl(control, _GET_FLAGS, request))[1]
        if not state & _UP:
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh14x", b"lo", state | _UP))


def give_up_rights(settings: dict[str, Any], *, has_filter: bool, counts_memory: bool) -> None:
    """Give up all rights for good, in the keeper: it is root of its user namespace by now."""
    with contextlib.suppress(OSError):
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.umask(0o022)
    num_processes = settings["num_processes"]
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, 1024, 4096),
        (resource.RLIMIT_MEMLOCK, 64 << 10, 64 << 10),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_SIGPENDING, 1024, 1024),
        (resource.RLIMIT_NPROC, num_processes, num_processes),
        (resource.RLIMIT_FSIZE, settings["storage_mb"] << 20, settings["storage_mb"] << 20),
    ):
        lower_limit(kind, soft, hard)
    kernel.prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    kernel.drop_capabilities(keep=KEPT, bounding=KEPT)
    kernel.prctl(4, 0)  # PR_SET_DUMPABLE: no process of the place may look into this one
    kernel.prctl(1, 9)  # PR_SET_PDEATHSIG: SIGKILL when the server dies
    if has_filter:
        seccomp.install(seccomp.build_place_filter(counts_memory=counts_memory))
