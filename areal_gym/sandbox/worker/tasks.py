"""Counts the threads and processes of a cell if the kernel cannot count them per cell.

RLIMIT_NPROC counts all processes of a user. If cells share a user with others, a correct program
would depend on its neighbours; so the fork server counts, and ends a cell that has too many.
"""

from __future__ import annotations

from . import limits, memory

_RLIMIT_LOCKS = 10
"""Unused by the kernel since Linux 2.4: stores a number that /proc shows."""


def note_limit(num_processes: int) -> None:
    """Record, in the cell, how many threads and processes it may have."""
    limits.lower_limit(_RLIMIT_LOCKS, num_processes)


def is_crowded(proc: int, pid: int) -> bool:
    """Return whether `pid` and its children have more threads than was recorded for it."""
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
