"""Watches what cells use, and ends those that use too much of what the kernel does not limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from . import memory, tasks
from .groups import Groups
from .jail import Jail


class Usage:
    """The memory, processes and files of the cells of one fork server.

    Args:
        jail: the isolation of the cells.
        groups: their control groups, if there are any.
        is_container: whether the fork server runs in a container.
        kill: ends a cell, by its pid.
    """

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
        self.base_memory = 0
        """Bytes of address space that a cell starts with."""
        self._next_check = 0.0
        self._num_kills = memory.num_kills()
        self._excesses: dict[int, str] = {}
        """What ended cells used too much of, by pid."""
        self._peaks_kb: dict[int, int] = {}
        """Peak memory seen of a cell's processes together, by its pid."""
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
        self._next_check = time.monotonic() + memory.PERIOD_S

    def _find_excess(self, pid: int, number: int) -> str:
        """Return what a cell uses too much of, as far as nothing else limits it."""
        jail = self._jail
        if self._uses_much_memory(pid, number):
            return "memory"
        if self._is_container:
            return ""  # its own limits cover processes and files
        if not jail.counts_processes and tasks.is_crowded(jail.proc, pid):
            return "processes"
        if not jail.has_mounts and memory.has_many_files(jail.proc, pid, jail.directory(number)):
            return "files"
        return ""

    def _uses_much_memory(self, pid: int, number: int) -> bool:
        if self._groups is not None:
            return self._groups.was_killed(number)  # one of its processes
        if self._is_container and memory.num_kills() > self._num_kills:
            return True  # the kernel ended one of them; the others must not start over
        held_kb, is_over = memory.held_by_tree(self._jail.proc, pid, self.base_memory)
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
            before, self._num_kills = self._num_kills, memory.num_kills()
            was_killed = self._num_kills > before
        return peak_kb, excess or ("memory" if was_killed else "")
