"""Memory of a snippet's processes together; the kernel's own limit is per process.

Two ways to know that it was used up. Where a snippet may fork on this machine, the fork server
looks at the trees of its cells every `PERIOD_S`: a burst may go over for so long. In a container
the kernel counts and kills, and says how often it did.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

__all__ = ["PERIOD_S", "is_overdrawn", "num_kills", "read", "tree"]

PERIOD_S = 0.1
_PAGE = resource.getpagesize()
_KILL_COUNTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def is_overdrawn(proc: int, pid: int, base_memory: int) -> bool:
    """Whether `pid` and all that it started hold more memory than `pid` alone may.

    Args:
        proc: descriptor of a /proc that shows them.
        base_memory: address space in bytes that `pid` began with, for which its own limit makes
            allowance.
    """
    try:
        pids = [process for process, _ in tree(proc, pid)]
        if len(pids) == 1:
            return False  # its own limit holds
        allowed = _address_space_limit(proc, pid) - base_memory
    except (OSError, ValueError):
        return False  # it ended meanwhile, or waits for its first snippet
    # Resident pages are counted at once, but shared ones for each who shares them; a fair count
    # walks the page tables, so it comes second.
    return sum(_resident(proc, p) for p in pids) > allowed < sum(_fair(proc, p) for p in pids)


def tree(proc: int, pid: int, parent: int = 0) -> Iterator[tuple[int, int]]:
    """`pid` and all that it started, parents first, each with its parent."""
    yield pid, parent
    for task in _tasks(proc, pid):
        for child in read(proc, f"{pid}/task/{task}/children").split():
            yield from tree(proc, int(child), pid)


def _tasks(proc: int, pid: int) -> list[str]:
    """Its threads; none when it is gone, which must not hide what the others hold."""
    try:
        tasks = os.open(f"{pid}/task", os.O_RDONLY, dir_fd=proc)
    except OSError:
        return []
    try:
        return os.listdir(tasks)
    except OSError:
        return []
    finally:
        os.close(tasks)


def _address_space_limit(proc: int, pid: int) -> int:
    for line in read(proc, f"{pid}/limits").splitlines():
        if line.startswith("Max address space"):
            return int(line.split()[3])
    raise ProcessLookupError


def _resident(proc: int, pid: int) -> int:
    fields = read(proc, f"{pid}/statm").split()
    return (int(fields[1]) - int(fields[2])) * _PAGE if fields else 0


def _fair(proc: int, pid: int) -> int:
    for line in read(proc, f"{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) << 10
    return _resident(proc, pid)  # not everyone may read it


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
