"""Counts the threads and processes of a cell where the kernel cannot count them for it alone.

RLIMIT_NPROC counts all that a user runs. Where cells share a user with others, a correct program
would depend on its neighbours; there the fork server counts, and ends a cell that has too many.
"""

from __future__ import annotations

from . import jail, memory

_RLIMIT_LOCKS = 10
"""The kernel has not looked at it since Linux 2.4: a place for a number that /proc shows."""


def note_limit(num_processes: int) -> None:
    """In the cell: say how many threads and processes it may have."""
    jail.lower_limit(_RLIMIT_LOCKS, num_processes)


def is_crowded(proc: int, pid: int) -> bool:
    """Whether `pid` and all that it started have more threads than was noted for it."""
    limit = _noted_limit(proc, pid)
    if limit is None:
        return False
    return sum(_num_threads(proc, process) for process, _ in memory.tree(proc, pid)) > limit


def _noted_limit(proc: int, pid: int) -> int | None:
    for line in memory.read(proc, f"{pid}/limits").splitlines():
        if line.startswith("Max file locks"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else None
    return None


def _num_threads(proc: int, pid: int) -> int:
    fields = memory.read(proc, f"{pid}/stat").rpartition(")")[2].split()
    return int(fields[17]) if len(fields) > 17 else 0
