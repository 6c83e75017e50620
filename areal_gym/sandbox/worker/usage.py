"""Watches what cells use, and ends those that use too much of what the kernel does not limit.

The fork server checks its cells every `PERIOD_S`: a burst may exceed limits for that long. Memory
is measured here if no control group counts it; in a container the kernel counts and kills, and
reports how often it did. Threads are counted here if the kernel cannot count them per cell:
RLIMIT_NPROC counts all processes of a user, so that a correct program whose cell shares a user with
others would depend on its neighbours.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator, Mapping

from .groups import Groups
from .jail import Jail
from .limits import NOTED_LIMIT

PERIOD_S = 0.1
_PAGE = resource.getpagesize()
_FILE_BYTES, _NUM_FILES = 64 << 20, 4096
"""Limits of a cell's files together, the same as in a private file system."""
_DEPTH = 200  # the limit of nested directories: each level holds a descriptor open
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KILL_COUNTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class Usage:
    """The memory, processes and files of the cells of one fork server; `kill` ends a cell."""

    def __init__(
        self,
        jail: Jail,
        groups: Groups | None,
        *,
        is_container: bool,
        kill: Callable[[int], None],
    ) -> None:
        self._jail = jail
        self._groups = groups
        self._is_container = is_container
        self._kill = kill
        self.base_memory = 0  # bytes of address space that a cell starts with: its limit has them
        self._next_check = 0.0
        self._num_kills = _num_kills()
        self._excesses: dict[int, str] = {}  # what ended cells used too much of, by pid
        self._peaks_kb: dict[int, int] = {}  # peak seen of a cell's processes together, by its pid
        # A cell without forks is limited by its own limits, and its files by a private file
        # system. A container limits the sum, too, but only at the limit of the largest call.
        self.is_watched = jail.can_fork or (
            not is_container
            and (groups is not None or not jail.has_mounts or not jail.counts_processes)
        )

    def bound(self, pid: int, number: int, memory_mb: int) -> None:
        """Set the memory limit of a cell for its next call."""
        if self._groups is None:
            return
        try:
            self._groups.bound(number, memory_mb)
        except OSError:  # it uses more already
            self._excesses[pid] = "memory"
            self._kill(pid)

    def check(self, cells: Mapping[int, int]) -> None:
        """End the cells (numbers by pid) that use too much; checks once per period."""
        if not self.is_watched or time.monotonic() < self._next_check:
            return
        for pid, number in cells.items():
            if excess := self._find_excess(pid, number):
                self._excesses[pid] = excess
                self._kill(pid)
        self._next_check = time.monotonic() + PERIOD_S

    def _find_excess(self, pid: int, number: int) -> str:
        """Return what a cell uses too much of, as far as nothing else limits it."""
        jail = self._jail
        if self._uses_much_memory(pid, number):
            return "memory"
        if self._is_container:
            return ""  # its own limits cover processes and files
        if not jail.counts_processes and _has_many_threads(jail.proc, pid):
            return "processes"
        if not jail.has_mounts and _has_many_files(jail.proc, pid, jail.directory(number)):
            return "files"
        return ""

    def _uses_much_memory(self, pid: int, number: int) -> bool:
        if self._groups is not None:
            return self._groups.was_killed(number)  # one of its processes
        if self._is_container and _num_kills() > self._num_kills:
            return True  # the kernel ended one of them; the others must not start over
        held_kb, is_over = _held_by_tree(self._jail.proc, pid, self.base_memory)
        self._peaks_kb[pid] = max(self._peaks_kb.get(pid, 0), held_kb)
        return is_over

    def end(self, pid: int, number: int) -> tuple[int, str]:
        """Return the peak memory in KB of an ended cell, and what it used too much of."""
        excess = self._excesses.pop(pid, "")
        peak_kb = self._peaks_kb.pop(pid, 0)
        was_killed = False
        if self._groups is not None:
            peak_kb, was_killed = self._groups.end(number)
        elif self._is_container:
            before, self._num_kills = self._num_kills, _num_kills()
            was_killed = self._num_kills > before
        return peak_kb, excess or ("memory" if was_killed else "")


def _held_by_tree(proc: int, pid: int, base_memory: int) -> tuple[int, bool]:
    """Return the memory in KB of `pid` and its children, and whether it exceeds the limit of `pid`.

    `proc` is a descriptor of a /proc that shows them, here and below.
    """
    limit = _limit(proc, pid, "Max address space")
    if limit is None:
        return 0, False  # it has ended, or waits for its first snippet
    pids = [process for process, _ in tree(proc, pid)]
    held, is_over = _held(proc, pids, limit - base_memory)
    return held >> 10, is_over


def processes_over(proc: int, pid: int, allowed: int) -> list[int]:
    """Return the descendants of `pid` if all together hold more than `allowed` bytes, else none."""
    pids = [process for process, _ in tree(proc, pid)]
    tables = sum(_page_tables(proc, process) for process in pids)
    return pids[1:] if _held(proc, pids, allowed - tables)[1] else []


def _page_tables(proc: int, pid: int) -> int:
    """Return the bytes of a process's page tables, which no resident size shows."""
    for line in _read(proc, f"{pid}/status").splitlines():
        if line.startswith("VmPTE:"):
            return int(line.split()[1]) << 10
    return 0


def _held(proc: int, pids: list[int], allowed: int) -> tuple[int, bool]:
    """Return the bytes that processes hold together, and whether these exceed `allowed`."""
    buffers = _buffers(proc, pids)
    sizes = [_resident(proc, p) for p in pids]
    private = sum(resident - shared for resident, shared in sizes)
    # Resident memory is known at once, but counts shared pages several times; a fair count walks
    # the page tables, so it comes second.
    if buffers + sum(resident for resident, _ in sizes) <= allowed:
        return buffers + private, False
    # The limit of one process already counts memory when it is allocated.
    fair = private if len(pids) == 1 else sum(_fair(proc, p) for p in pids)
    return buffers + fair, buffers + fair > allowed


def _buffers(proc: int, pids: list[int]) -> int:
    """Return the maximum bytes in the pipes and sockets of these processes.

    The actual bytes are not visible. Descriptors in transit through a socket, at most as many as a
    process may have, are not counted.
    """
    links = set()
    for path in (f"{pid}/fd" for pid in pids):
        for name in _names(proc, path):
            with contextlib.suppress(OSError):
                links.add(os.readlink(f"{path}/{name}", dir_fd=proc))
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


def _has_many_threads(proc: int, pid: int) -> bool:
    """Return whether `pid` and its children have more threads than was noted for it."""
    limit = _limit(proc, pid, NOTED_LIMIT)
    stats = (stat_fields(proc, process) for process, _ in tree(proc, pid))
    return limit is not None and limit < sum(int(fields[17]) for fields in stats if fields[17:])


def _has_many_files(proc: int, pid: int, directory: str) -> bool:
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
    for task in _names(proc, f"{pid}/task"):
        for child in _read(proc, f"{pid}/task/{task}/children").split():
            yield from tree(proc, int(child), pid)


def stat_fields(proc: int, pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, the state first; none if it is gone."""
    return _read(proc, f"{pid}/stat").rpartition(")")[2].split()


def _names(proc: int, path: str) -> list[str]:
    """Return the names in a directory of /proc; none if its process is gone or unreadable."""
    with contextlib.suppress(OSError):
        directory = os.open(path, os.O_RDONLY, dir_fd=proc)
        try:
            return os.listdir(directory)
        finally:
            os.close(directory)
    return []


def _limit(proc: int, pid: int, name: str) -> int | None:
    """Return a process's own (soft) limit; None if it is unlimited, or the process gone."""
    for line in _read(proc, f"{pid}/limits").splitlines():
        if line.startswith(name):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else None
    return None


def _resident(proc: int, pid: int) -> tuple[int, int]:
    """Return resident bytes, and those that it shares with files or other processes."""
    fields = _read(proc, f"{pid}/statm").split()
    return (int(fields[1]) * _PAGE, int(fields[2]) * _PAGE) if fields else (0, 0)


def _fair(proc: int, pid: int) -> int:
    """Return resident bytes without files on disk; shared pages are divided among processes."""
    sizes = {}
    for line in _read(proc, f"{pid}/smaps_rollup").splitlines():
        name, _, rest = line.partition(":")
        if name.startswith("Pss_"):
            sizes[name] = int(rest.split()[0]) << 10
    if not sizes:  # not readable for every user
        resident, shared = _resident(proc, pid)
        return resident - shared
    return sizes["Pss_Anon"] + sizes["Pss_Shmem"]


def _read(proc: int, path: str) -> str:
    """Return the text of a file of /proc; empty if the process is gone."""
    try:
        # A snippet chooses its name, and so the bytes of /proc/PID/stat.
        with open(path, errors="replace", opener=functools.partial(os.open, dir_fd=proc)) as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def _num_kills() -> int:
    """Return how many processes of this container the kernel ended because memory ran out."""
    for path in _KILL_COUNTS:
        with contextlib.suppress(OSError), open(path) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return 0
