"""Control groups of places: memory, processes and processors of each, in both versions."""

from __future__ import annotations

import contextlib
import os

from .groups import Groups, own_places, remove_abandoned, write_file

_PREFIX = "areal-gym-"
_PERIOD_US = 100_000


class PlaceGroups:
    """The control groups of all places of a server; `controllers` names those that work here.

    Memory is counted by the sandbox's groups. In version 2 of the interface the same groups count
    processes and processors; in version 1 each controller has groups of its own.
    """

    def __init__(self, name: str, memory_mb: int) -> None:
        self._memory: Groups | None = None
        self._apart: dict[str, _Apart] = {}
        self._joint: set[str] = set()
        with contextlib.suppress(OSError):
            self._memory = Groups(name, memory_mb)
        for controller in ("pids", "cpu"):
            if self._memory is not None and self._memory.enable(controller):
                self._joint.add(controller)
                continue
            with contextlib.suppress(OSError):
                self._apart[controller] = _Apart(name, controller)
        self.controllers = {*self._joint, *self._apart}
        if self._memory is not None:
            self.controllers.add("memory")

    def open(self, number: int, *, memory_mb: int, num_processes: int, cpus: float | None) -> None:
        """Prepare empty groups for the place `number`."""
        if self._memory is not None:
            self._memory.open(number)
            self._memory.bound(number, memory_mb)
        self._set(number, "pids", "pids.max", "pids.max", str(num_processes))
        if cpus is not None:
            quota = max(1000, int(cpus * _PERIOD_US))
            joint = f"{quota} {_PERIOD_US}"
            self._set(number, "cpu", "cpu.cfs_quota_us", "cpu.max", str(quota), joint)

    def _set(
        self, number: int, controller: str, file: str, joint: str, text: str, joint_text: str = ""
    ) -> None:
        if controller in self._apart:
            self._apart[controller].open(number, file, text)
        elif controller in self._joint and self._memory is not None:
            self._memory.set(number, joint, joint_text or text)

    def join(self, number: int) -> None:
        """Move the calling process, a new keeper, to the groups of its place."""
        if self._memory is not None:
            self._memory.join(number)
        for groups in self._apart.values():
            groups.join(number)

    def was_killed(self, number: int) -> bool:
        """Return whether the kernel ended a process of a place because memory ran out."""
        return self._memory is not None and self._memory.was_killed(number)

    def end(self, number: int) -> None:
        """Take back the groups of a place that has ended."""
        for groups in self._apart.values():
            groups.end(number)
        if self._memory is not None:
            self._memory.end(number)

    def close(self) -> None:
        """Remove all groups, which are empty by now."""
        for groups in self._apart.values():
            groups.close()
        if self._memory is not None:
            self._memory.close()


class _Apart:
    """The groups of one controller of version 1; raises OSError if there can be none."""

    def __init__(self, name: str, controller: str) -> None:
        kind, places = own_places(controller)
        if kind != "cgroup":
            raise PermissionError(f"the controller {controller} is not delegated")
        remove_abandoned(places[0])
        self._path = f"{places[0]}/{_PREFIX}{name}"
        os.mkdir(self._path, 0o700)
        self._top = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)  # /sys is hidden later
        self._parent = os.open(places[0], os.O_RDONLY | os.O_DIRECTORY)
        self._name = os.path.basename(self._path)
        self._groups: dict[int, str] = {}
        self._idle: list[str] = []
        self._num_made = 0

    def open(self, number: int, file: str, text: str) -> None:
        if self._idle:
            group = self._idle.pop()
        else:
            group = str(self._num_made)
            self._num_made += 1
            os.mkdir(group, dir_fd=self._top)
        self._groups[number] = group
        write_file(self._top, f"{group}/{file}", text)

    def join(self, number: int) -> None:
        if number in self._groups:
            write_file(self._top, f"{self._groups[number]}/tasks", "0")

    def end(self, number: int) -> None:
        group = self._groups.pop(number, None)
        if group is not None:
            self._idle.append(group)

    def close(self) -> None:
        for group in (*self._idle, *self._groups.values()):
            with contextlib.suppress(OSError):
                os.rmdir(group, dir_fd=self._top)
        with contextlib.suppress(OSError):
            os.rmdir(self._name, dir_fd=self._parent)
        os.close(self._top)
        os.close(self._parent)
