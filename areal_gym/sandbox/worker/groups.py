"""Control groups: the kernel counts the memory of a cell and its children.

Every kind of memory counts: private and shared pages, files in memory, buffers of pipes and
sockets, page tables, the kernel's own records. A group needs a part of the hierarchy that this
process may write to: root has one, and so has a user with a systemd delegation. Otherwise the fork
server counts (`memory`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial
from typing import NamedTuple

_SLACK_BYTES = 32 << 20
"""Added to the snippet's limit: the kernel's data for its processes, copied pages of the fork
server, and room to report a MemoryError, which a process's own limit raises first."""
_PREFIX = "areal-gym-"


class _Version(NamedTuple):
    """The names of one version of the kernel's interface."""

    limit: str
    swap_limit: str
    peak: str
    kills: str
    # In version 1, the file that moves one thread: unlike the file that moves a whole process it
    # does not wait for every processor (0.5 ms instead of 10).
    join: str


_VERSIONS = {
    "cgroup": _Version(
        *("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes"),
        *("memory.oom_control", "tasks"),
    ),
    "cgroup2": _Version(
        "memory.max", "memory.swap.max", "memory.peak", "memory.events", "cgroup.procs"
    ),
}


class Groups:
    """The control groups of a fork server, one per cell; raises OSError if there can be none."""

    def __init__(self, name: str, memory_mb: int) -> None:
        self._name = f"{_PREFIX}{name}"
        self.default_mb = memory_mb
        self._kind, places = own_places()
        self._files = _VERSIONS[self._kind]
        # As descriptors: a private root has no /sys.
        self._top, self._parent = self._make_top(places)
        self._groups: dict[int, str] = {}
        self._bounds: dict[str, int] = {}
        self._idle: list[str] = []
        self._num_made = 0
        try:
            self._try()
        except OSError:
            self.close()
            raise

    def _make_top(self, places: list[str]) -> tuple[int, int]:
        for place in places:
            parent = -1
            try:
                remove_abandoned(place)
                parent = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
                os.mkdir(self._name, 0o700, dir_fd=parent)
                top = os.open(self._name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent)
                if self._kind == "cgroup2":
                    write_file(top, "cgroup.subtree_control", "+memory")
            except OSError:
                if parent >= 0:
                    with contextlib.suppress(OSError):
                        os.rmdir(self._name, dir_fd=parent)
                    os.close(parent)
                continue
            return top, parent
        raise PermissionError("memory control groups cannot be made")

    def _try(self) -> None:
        """Move a process into a group: a group that can be made cannot always be used."""
        self.open(0)
        pid = os.fork()
        if pid == 0:
            try:
                self.join(0)
            except OSError:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        self.end(0)
        if status:
            raise PermissionError("processes cannot be moved to a control group")

    def open(self, number: int) -> None:
        """Prepare an empty group for the cell `number`, which then joins it."""
        if self._idle:
            group = self._idle.pop()
            write_file(self._top, f"{group}/{self._files.peak}", "0")
        else:
            group = str(self._num_made)
            self._num_made += 1
            os.mkdir(group, dir_fd=self._top)
            self._bounds[group] = 0
        self._groups[number] = group
        self.bound(number, self.default_mb)

    def join(self, number: int) -> None:
        """Move the calling process, a new cell, to its group."""
        write_file(self._top, f"{self._groups[number]}/{self._files.join}", "0")

    def bound(self, number: int, memory_mb: int) -> None:
        """Limit the memory of a cell's processes together; raises OSError if they use more."""
        group = self._groups[number]
        if self._bounds[group] == memory_mb:
            return
        limit = str((memory_mb << 20) + _SLACK_BYTES)
        path = f"{group}/{self._files.swap_limit}"
        swap = "0" if self._kind == "cgroup2" else limit
        # The limit with swap must not be below the one without; not every kernel has it.
        if self._bounds[group] < memory_mb:
            with contextlib.suppress(OSError):
                write_file(self._top, path, swap)
        write_file(self._top, f"{group}/{self._files.limit}", limit)
        with contextlib.suppress(OSError):
            write_file(self._top, path, swap)
        self._bounds[group] = memory_mb

    def enable(self, controller: str) -> bool:
        """Let the groups count by another controller, too; return whether they do (version 2)."""
        if self._kind != "cgroup2":
            return False
        try:
            write_file(self._top, "cgroup.subtree_control", f"+{controller}")
        except OSError:
            return False
        return True

    def set(self, number: int, file: str, text: str) -> None:
        """Write a file of another controller in the group of `number`."""
        write_file(self._top, f"{self._groups[number]}/{file}", text)

    def end(self, number: int) -> tuple[int, bool]:
        """Take back an ended cell's group; return its peak in KB, and whether memory ran out."""
        group = self._groups.pop(number, None)
        if group is None:
            return 0, False  # no group could be made
        peak_kb, num_kills = 0, self._num_kills(group)
        with contextlib.suppress(OSError, ValueError):  # Linux before 5.19 has no peak
            peak_kb = int(_read(self._top, f"{group}/{self._files.peak}")) >> 10
        # Kill counts cannot be reset, nor can the peak in version 2.
        if self._kind == "cgroup" and not num_kills:
            self._idle.append(group)
        else:
            self._remove(group)
        return peak_kb, num_kills > 0

    def was_killed(self, number: int) -> bool:
        """Return whether the kernel ended a process of a living cell because memory ran out."""
        return self._num_kills(self._groups[number]) > 0

    def _num_kills(self, group: str) -> int:
        with contextlib.suppress(OSError):
            text = _read(self._top, f"{group}/{self._files.kills}")
            return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))
        return 0

    def _remove(self, group: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(group, dir_fd=self._top)
            del self._bounds[group]

    def close(self) -> None:
        """Remove all groups, which are empty by now."""
        for group in list(self._bounds):
            self._remove(group)
        with contextlib.suppress(OSError):
            os.rmdir(self._name, dir_fd=self._parent)
        os.close(self._top)
        os.close(self._parent)


def remove_groups(name: str) -> None:
    """End the processes and remove the groups of a killed fork server; wait a second at most."""
    with contextlib.suppress(OSError):
        for place in own_places()[1]:
            top = f"{place}/{_PREFIX}{name}"
            deadline = time.monotonic() + 1.0
            while os.path.isdir(top) and time.monotonic() < deadline:
                _kill_all(top)
                _remove_top(top)
                time.sleep(0.001)


def own_places(controller: str = "memory") -> tuple[str, list[str]]:
    """Return the kind of the hierarchy, and the directories where groups might be made.

    Groups are made under this process's own group, so that its limits apply to them, too. In
    version 2 a group with processes cannot have children: there the parent group serves.
    """
    with open("/proc/self/cgroup") as groups, open("/proc/self/mountinfo") as mounts:
        return find_places(groups.read(), mounts.read(), controller)


def find_places(groups: str, mounts: str, controller: str = "memory") -> tuple[str, list[str]]:
    """Return the kind of the hierarchy that counts memory, and the directories to try.

    They are read from the texts of /proc/self/cgroup and /proc/self/mountinfo; FileNotFoundError:
    no hierarchy that counts memory (or another `controller`) is mounted.
    """
    own = {}
    for row in groups.splitlines():
        _, controllers, path = row.split(":", 2)
        if controller in controllers.split(","):
            own["cgroup"] = path
        elif not controllers:
            own["cgroup2"] = path
    directories: dict[str, str] = {}
    for row in mounts.splitlines():
        first, _, second = row.partition(" - ")
        root, point = first.split()[3:5]
        kind, _, options = second.split(" ", 2)
        if kind in own and (kind == "cgroup2" or controller in options.split(",")):
            inside = os.path.relpath(own[kind], root)
            if not inside.startswith(".."):
                directories.setdefault(kind, os.path.normpath(f"{point}/{inside}"))
    if "cgroup" in directories:
        return "cgroup", [directories["cgroup"]]
    if "cgroup2" in directories:
        own_group = directories["cgroup2"]
        return "cgroup2", [own_group, os.path.dirname(own_group)]
    raise FileNotFoundError("no hierarchy of control groups is mounted")


def remove_abandoned(place: str) -> None:
    """Remove groups whose owner is gone: their names have its pid."""
    for name in os.listdir(place):
        owner = name[len(_PREFIX) :].partition("-")[0]
        if name.startswith(_PREFIX) and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            _remove_top(f"{place}/{name}")


def _kill_all(top: str) -> None:
    for name in os.listdir(top):
        with contextlib.suppress(OSError), open(f"{top}/{name}/cgroup.procs") as rows:
            for pid in map(int, rows):
                if pid:  # 0 stands for a process in an invisible pid namespace
                    os.kill(pid, signal.SIGKILL)


def _remove_top(top: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(top):
            if os.path.isdir(f"{top}/{name}"):
                os.rmdir(f"{top}/{name}")
        os.rmdir(top)


def write_file(directory: int, path: str, text: str) -> None:
    """Write an existing file below the directory behind a descriptor."""
    fd = os.open(path, os.O_WRONLY, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(directory: int, path: str) -> str:
    with open(path, opener=partial(os.open, dir_fd=directory)) as file:
        return file.read()
