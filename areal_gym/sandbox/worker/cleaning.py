"""Removing what a snippet wrote, however it wrote it."""

from __future__ import annotations

import contextlib
import os

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove_tree(path: str) -> None:
    """Remove the directory `path`, which nobody writes to any more; what does not go, stays.

    Trees may be deeper than recursion or the length of a path allow, and directories may be
    locked. So this goes from directory to directory and back by "..", opening each on the way.
    """
    with contextlib.suppress(OSError):
        os.chmod(path, 0o700)
        here = os.open(path, _OPEN)
        try:
            # For each directory on the way here, the ones in it that are still to be removed.
            way = [_unlink_files(here)]
            while len(way) > 1 or way[-1]:
                if way[-1]:
                    here = _move(here, way[-1][-1])
                    way.append(_unlink_files(here))
                else:
                    here = _move(here, "..")
                    way.pop()
                    os.rmdir(way[-1].pop(), dir_fd=here)
        finally:
            os.close(here)
        os.rmdir(path)


def _unlink_files(directory: int) -> list[str]:
    """Remove the files; the names of the directories."""
    return [name for name in os.listdir(directory) if not _unlink(name, directory)]


def _unlink(name: str, directory: int) -> bool:
    """Remove a file; False when it is a directory."""
    try:
        os.unlink(name, dir_fd=directory)
    except (IsADirectoryError, PermissionError):
        return False
    return True


def _move(here: int, name: str) -> int:
    if name != "..":
        # A locked one belongs to its snippet's user, which is ours or one that we are root to.
        os.chmod(name, 0o700, dir_fd=here)
    there = os.open(name, _OPEN, dir_fd=here)
    os.close(here)
    return there
