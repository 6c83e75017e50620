"""Measures the memory and files of a cell's processes, if no control group counts them.

The fork server checks its cells every `PERIOD_S`: a burst may exceed limits for that long. In a
container the kernel counts and kills, and reports how often it did.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import stat
from collections.abc import Iterator

PERIOD_S = 0.1
_PAGE = resource.getpagesize()
_FILE_BYTES, _NUM_FILES = 64 << 20, 4096
"""Limits of a cell's files together, the same as in a private file system."""
_DEPTH = 200
"""The limit of nested directories: each level holds a descriptor open."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KILL_COUNTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def held_by_tree(proc: int, pid: int, base_memory: int) -> tuple[int, bool]:
    """Return the memory in KB of `pid` and its children, and whether it exceeds the limit of `pid`.

    Args:
        proc: a descriptor of a /proc that shows them.
        base_memory: bytes of address space that `pid` started with, which its limit includes.
    """
    try:
        pids = [process for process, _ in tree(proc, pid)]
        allowed = _address_space_limit(proc, pid) - base_memory
    except (OSError, ValueError):
        return 0, False  # it has ended, or waits for its first snippet
    buffers = _buffers(proc, pids)
    private = sum(_private(proc, p) for p in pids)
    # Resident memory is known at once, but counts shared pages several times; a fair count walks
    # the page tables, so it comes second.
    if buffers + sum(_resident(proc, p) for p in pids) <= allowed:
        return (buffers + private) >> 10, False
    # The limit of one process already counts memory when it is allocated.
    fair = private if len(pids) == 1 else sum(_fair(proc, p) for p in pids)
    return (buffers + fair) >> 10, buffers + fair > allowed


def _buffers(proc: int, pids: list[int]) -> int:
    """Return the maximum bytes in the pipes and sockets of these processes.

    The actual bytes are not visible. Descriptors in transit through a socket, at most as many as a
    process may have, are not counted.
    """
    links = {link for p in pids for link in _descriptors(proc, p)}
    sizes = {"pipe": 64 << 10, "socket": 2 * _socket_bytes()}
    return sum(sizes.get(link.partition(":")[0], 0) for link in links)


@functools.cache
def _socket_bytes() -> int:
    """Return the size of a socket's buffer, which seccomp keeps a snippet from raising."""
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            return int(file.read())
    except OSError:
        return 208 << 10


def _descriptors(proc: int, pid: int) -> list[str]:
    """Return the targets of its descriptors."""
    links = []
    for name in _names(proc, f"{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"{pid}/fd/{name}", dir_fd=proc))
    return links


def has_many_files(proc: int, pid: int, directory: str) -> bool:
    """Return whether the files of a cell, deleted open ones included, exceed the limits."""
    used, num_files = _unlinked(proc, pid)
    try:
        # The directories that lead here, with the names still to be visited in each.
        stack = [(os.open(directory, _DIRECTORY), ["."])]
    except OSError:
        return False  # not made yet, or removed
    try:
        while stack and used <= _FILE_BYTES and num_files <= _NUM_FILES and len(stack) < _DEPTH:
            directory_fd, names = stack[-1]
            if not names:
                os.close(directory_fd)
                stack.pop()
                continue
            with contextlib.suppress(OSError):  # removed meanwhile
                child_fd = _open_directory(directory_fd, names.pop())
                stack.append((child_fd, []))
                with os.scandir(child_fd) as entries:
                    for entry in entries:
                        about = entry.stat(follow_symlinks=False)
                        num_files += 1
                        used += about.st_blocks * 512
                        if stat.S_ISDIR(about.st_mode):
                            stack[-1][1].append(entry.name)
                        if num_files > _NUM_FILES:
                            break
    finally:
        for fd, _ in stack:
            os.close(fd)
    return used > _FILE_BYTES or num_files > _NUM_FILES or len(stack) >= _DEPTH


def _open_directory(parent: int, name: str) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        # A locked directory can still have content. By descriptor, because the name may be a link
        # elsewhere by now. The directory belongs to this user, or this process is root.
        locked = os.open(name, _DIRECTORY | os.O_PATH, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{locked}", 0o700)
            return os.open(".", _DIRECTORY, dir_fd=locked)
        finally:
            os.close(locked)


def _unlinked(proc: int, pid: int) -> tuple[int, int]:
    """Return bytes and number of the deleted files that a process holds open."""
    used = number = 0
    for name in _names(proc, f"{pid}/fd"):
        with contextlib.suppress(OSError):
            about = os.stat(f"{pid}/fd/{name}", dir_fd=proc)
            if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                used += about.st_blocks * 512
                number += 1
    return used, number


def tree(proc: int, pid: int, parent: int = 0) -> Iterator[tuple[int, int]]:
    """Yield `pid` and its children, parents first, each with its parent."""
    yield pid, parent
    for task in _tasks(proc, pid):
        for child in read(proc, f"{pid}/task/{task}/children").split():
            yield from tree(proc, int(child), pid)


def _tasks(proc: int, pid: int) -> list[str]:
    """Return its threads; none if it is gone, so that the others are still counted."""
    return _names(proc, f"{pid}/task")


def _names(proc: int, path: str) -> list[str]:
    """Return the names in a directory of /proc; none if its process is gone or unreadable."""
    try:
        directory = os.open(path, os.O_RDONLY, dir_fd=proc)
    except OSError:
        return []
    try:
        return os.listdir(directory)
    except OSError:
        return []
    finally:
        os.close(directory)


def _address_space_limit(proc: int, pid: int) -> int:
    for line in read(proc, f"{pid}/limits").splitlines():
        if line.startswith("Max address space"):
            return int(line.split()[3])
    raise ProcessLookupError


def _private(proc: int, pid: int) -> int:
    """Return resident bytes that it does not share with files or other processes."""
    fields = read(proc, f"{pid}/statm").split()
    pages = (int(fields[1]) - int(fields[2])) if fields else 0
    return pages * _PAGE


def _resident(proc: int, pid: int) -> int:
    fields = read(proc, f"{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _fair(proc: int, pid: int) -> int:
    """Return resident bytes without files on disk; shared pages are divided among processes."""
    sizes = {}
    for line in read(proc, f"{pid}/smaps_rollup").splitlines():
        name, _, rest = line.partition(":")
        if name.startswith("Pss_"):
            sizes[name] = int(rest.split()[0]) << 10
    if not sizes:
        return _private(proc, pid)  # not readable for every user
    return sizes["Pss_Anon"] + sizes["Pss_Shmem"]


def read(proc: int, path: str) -> str:
    """Return the text of a file of /proc; empty if the process is gone."""
    try:
        fd = os.open(path, os.O_RDONLY, dir_fd=proc)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 16).decode()
    except OSError:
        return ""
    finally:
        os.close(fd)


def num_kills() -> int:
    """Return how many processes of this container the kernel ended because memory ran out."""
    for path in _KILL_COUNTS:
        try:
            with open(path) as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except OSError:
            continue
    return 0
