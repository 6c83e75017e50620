"""Memory and files of a snippet's processes together, where no control group counts them.

The fork server looks at its cells every `PERIOD_S`: a burst may go over for so long. In a container
the kernel counts and kills, and says how often it did.
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
"""What a cell's files may hold together: as in a private file system."""
_DEPTH = 200
"""Directories in directories: each on the way is held open while those in it are looked at."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KILL_COUNTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def held_by_tree(proc: int, pid: int, base_memory: int) -> tuple[int, bool]:
    """Memory in KB that `pid` and all that it started hold, and whether `pid` alone may less.

    Args:
        proc: descriptor of a /proc that shows them.
        base_memory: address space in bytes that `pid` began with, for which its own limit makes
            allowance.
    """
    try:
        pids = [process for process, _ in tree(proc, pid)]
        allowed = _address_space_limit(proc, pid) - base_memory
    except (OSError, ValueError):
        return 0, False  # it ended meanwhile, or waits for its first snippet
    buffers = _buffers(proc, pids)
    private = sum(_private(proc, p) for p in pids)
    # All that is resident is known at once, but counts for each who shares it; a fair count walks
    # the page tables, so it comes second.
    if buffers + sum(_resident(proc, p) for p in pids) <= allowed:
        return (buffers + private) >> 10, False
    # The limit of one process counts its memory as it asks for it, before the first page is used.
    fair = private if len(pids) == 1 else sum(_fair(proc, p) for p in pids)
    return (buffers + fair) >> 10, buffers + fair > allowed


def _buffers(proc: int, pids: list[int]) -> int:
    """The most bytes that pipes and sockets of these processes can hold.

    What they do hold is not to be seen. Those that are on their way through a socket, at most as
    many as a process may have descriptors, are not counted.
    """
    links = {link for p in pids for link in _descriptors(proc, p)}
    sizes = {"pipe": 64 << 10, "socket": 2 * _socket_bytes()}
    return sum(sizes.get(link.partition(":")[0], 0) for link in links)


@functools.cache
def _socket_bytes() -> int:
    """What may wait in a socket, whose limit seccomp keeps a snippet from raising."""
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            return int(file.read())
    except OSError:
        return 208 << 10


def _descriptors(proc: int, pid: int) -> list[str]:
    """What its descriptors lead to."""
    links = []
    for name in _names(proc, f"{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"{pid}/fd/{name}", dir_fd=proc))
    return links


def has_many_files(proc: int, pid: int, directory: str) -> bool:
    """Whether a cell has more in its directory, or open and deleted, than is allowed together."""
    used, num_files = _unlinked(proc, pid)
    try:
        # The directories on the way here, and the names of those in each that are still to come.
        way = [(os.open(directory, _DIRECTORY), ["."])]
    except OSError:
        return False  # not made yet, or gone
    try:
        while way and used <= _FILE_BYTES and num_files <= _NUM_FILES and len(way) < _DEPTH:
            here, names = way[-1]
            if not names:
                os.close(here)
                way.pop()
                continue
            with contextlib.suppress(OSError):  # removed meanwhile
                there = _open_directory(here, names.pop())
                way.append((there, []))
                with os.scandir(there) as entries:
                    for entry in entries:
                        about = entry.stat(follow_symlinks=False)
                        num_files += 1
                        used += about.st_blocks * 512
                        if stat.S_ISDIR(about.st_mode):
                            way[-1][1].append(entry.name)
                        if num_files > _NUM_FILES:
                            break
    finally:
        for fd, _ in way:
            os.close(fd)
    return used > _FILE_BYTES or num_files > _NUM_FILES or len(way) >= _DEPTH


def _open_directory(parent: int, name: str) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        # It can be written to nevertheless. By descriptor: the name may be another thing's by now,
        # a link out of here. It is our user's, or we are root.
        locked = os.open(name, _DIRECTORY | os.O_PATH, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{locked}", 0o700)
            return os.open(".", _DIRECTORY, dir_fd=locked)
        finally:
            os.close(locked)


def _unlinked(proc: int, pid: int) -> tuple[int, int]:
    """Bytes and number of the files that a process holds open and has deleted."""
    used = number = 0
    for name in _names(proc, f"{pid}/fd"):
        with contextlib.suppress(OSError):
            about = os.stat(f"{pid}/fd/{name}", dir_fd=proc)
            if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                used += about.st_blocks * 512
                number += 1
    return used, number


def tree(proc: int, pid: int, parent: int = 0) -> Iterator[tuple[int, int]]:
    """`pid` and all that it started, parents first, each with its parent."""
    yield pid, parent
    for task in _tasks(proc, pid):
        for child in read(proc, f"{pid}/task/{task}/children").split():
            yield from tree(proc, int(child), pid)


def _tasks(proc: int, pid: int) -> list[str]:
    """Its threads; none when it is gone, which must not hide what the others hold."""
    return _names(proc, f"{pid}/task")


def _names(proc: int, path: str) -> list[str]:
    """The names in a directory of /proc; none when its process is gone or not ours to look at."""
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
    """Resident bytes that it shares with no file and no other."""
    fields = read(proc, f"{pid}/statm").split()
    pages = (int(fields[1]) - int(fields[2])) if fields else 0
    return pages * _PAGE


def _resident(proc: int, pid: int) -> int:
    fields = read(proc, f"{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _fair(proc: int, pid: int) -> int:
    """Resident bytes that are not of files on disk, what is shared divided among those who do."""
    sizes = {}
    for line in read(proc, f"{pid}/smaps_rollup").splitlines():
        name, _, rest = line.partition(":")
        if name.startswith("Pss_"):
            sizes[name] = int(rest.split()[0]) << 10
    if not sizes:
        return _private(proc, pid)  # not everyone may read it
    return sizes["Pss_Anon"] + sizes["Pss_Shmem"]


def read(proc: int, path: str) -> str:
    """The text of a file of /proc; empty when the process is gone."""
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
    """How many processes of this container the kernel ended for want of memory."""
    for path in _KILL_COUNTS:
        try:
            with open(path) as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except OSError:
            continue
    return 0
