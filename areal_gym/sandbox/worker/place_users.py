"""The users of places: which ids of this machine stand for root and the others inside."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass

from . import kernel
from .groups import write_file

_NUM_USERS = 65_536
_FIRST = 1_879_048_192  # far above what machines and containers hand out


@dataclass(frozen=True)
class UserRange:
    """The ids, as the server sees them, that are 0 to `size` - 1 in a place."""

    first: int
    size: int
    is_machine: bool
    """Whether the server is root of the machine, and not of a user namespace of its own."""

    def write_maps(self, process: int) -> None:
        """Write the maps of a process (a descriptor of its /proc directory) in a new namespace."""
        if self.size == 1:
            write_file(process, "setgroups", "deny")
        for name in ("uid_map", "gid_map"):
            write_file(process, name, f"0 {self.first} {self.size}")

    def inside(self, outside: int) -> int:
        """Return the id in a place of an id out here; 65534 where there is none."""
        number = outside - self.first
        return number if 0 <= number < self.size else 65_534

    def outside(self, inside: int) -> int:
        """Return the id out here of one in a place; root's where it has too few."""
        return self.first + (inside if 0 <= inside < self.size else 0)


def root_range() -> UserRange:
    """Return the range for places of root: never root's own id."""
    with open("/proc/self/uid_map") as rows:
        end = max(int(row.split()[0]) + int(row.split()[2]) for row in rows)
    if end >= _FIRST + _NUM_USERS:
        return UserRange(_FIRST, _NUM_USERS, True)
    # Root of a container with few ids of its own.
    if end > 2000:
        return UserRange(1000, end - 1000, True)
    raise PermissionError("this user namespace has too few ids for the users of a place")


def enter_own_namespaces(user: str) -> UserRange:
    """Move an ordinary user to a user and pid namespace where it is root; return the range.

    With ranges in /etc/subuid and /etc/subgid and the program newuidmap, places have many users.
    """
    uid, gid = os.geteuid(), os.getegid()
    ranges = [_granted(f"/etc/sub{kind}id", user, uid) for kind in "ug"]
    programs = [shutil.which(name) for name in ("newuidmap", "newgidmap")]
    size = 1
    if all(first for first, _ in ranges) and all(programs):
        size = min(_NUM_USERS, *(count for _, count in ranges)) + 1
        _map_by_programs(uid, gid, size, [first for first, _ in ranges], programs)
    else:
        kernel.unshare(kernel.NEWUSER)
        me = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
        write_file(me, "setgroups", "deny")
        write_file(me, "uid_map", f"0 {uid} 1")
        write_file(me, "gid_map", f"0 {gid} 1")
        os.close(me)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.unshare(kernel.NEWPID)
    pid = os.fork()
    if pid:
        os.closerange(3, 1 << 16)
        os.waitpid(pid, 0)
        os._exit(0)
    kernel.prctl(1, 9)  # PR_SET_PDEATHSIG
    return UserRange(0, size, False)


def _granted(file: str, user: str, uid: int) -> tuple[int, int]:
    """Return the first id and the number of ids that a file grants a user; zeros if none."""
    with contextlib.suppress(OSError), open(file) as rows:
        for row in rows:
            name, _, rest = row.strip().partition(":")
            first, _, count = rest.partition(":")
            if name in (user, str(uid)) and first.isdigit() and count.isdigit():
                return int(first), int(count)
    return (0, 0)


def _map_by_programs(
    uid: int, gid: int, size: int, firsts: list[int], programs: list[str | None]
) -> None:
    """Enter a user namespace whose maps a child writes, through the programs that may."""
    ready, done = os.pipe(), os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.read(ready[0], 1)
        code = 0
        for own, first, program in zip((uid, gid), firsts, programs, strict=True):
            command = [
                str(program),
                str(parent),
                "0",
                str(own),
                "1",
                "1",
                str(first),
                str(size - 1),
            ]
            code |= subprocess.run(command, check=False).returncode
        os.write(done[1], b"x" if code == 0 else b"-")
        os._exit(0)
    kernel.unshare(kernel.NEWUSER)
    os.write(ready[1], b"x")
    answer = os.read(done[0], 1)
    os.waitpid(child, 0)
    for fd in (*ready, *done):
        os.close(fd)
    if answer != b"x":
        raise PermissionError("newuidmap or newgidmap refused the ranges of this user")
