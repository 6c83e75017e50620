"""A lock on a directory: one process writes to a run, and others can see that it does."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from areal_gym.errors import InfrastructureError


class DirectoryLock:
    """Claims a directory for this process until `release` or the process's end.

    Raises:
        InfrastructureError: another process has claimed it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise InfrastructureError(
                f"another process is writing to {path}",
                hints=["wait for its end, or choose another directory with --out"],
            ) from None
        except OSError:
            # Some network file systems lock no directories; there, the rules of `mode` must do.
            pass

    def release(self) -> None:
        """Give the directory up. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def is_valid(self) -> bool:
        """Whether the path still leads to the directory that was claimed."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine has the lock; False if the system does not tell."""
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    # Asking for the lock ourselves could get in the way of a run that begins.
    return any(" FLOCK " in line and f":{inode} " in line for line in locks.splitlines())
