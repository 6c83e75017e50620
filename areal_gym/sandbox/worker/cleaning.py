"""Removing what a snippet wrote, however it wrote it."""

from __future__ import annotations

import contextlib
import os
import secrets

__all__ = ["remove_tree"]

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove_tree(path: str) -> None:
    """Remove the directory `path`, which nobody writes to any more; what does not go, stays.

    Trees may be deeper than recursion or the length of a path allow, and directories may be
    locked: each one is opened, what it holds moves up to `path`, and so nothing is ever deep.
    """
    with contextlib.suppress(OSError):
        os.chmod(path, 0o700)
        root = os.open(path, _OPEN)
        try:
            prefix, number = secrets.token_hex(8), 0
            while names := os.listdir(root):
                for name in names:
                    if _unlink(name, root):
                        continue
                    inner = _open(name, root)
                    try:
                        for child in os.listdir(inner):
                            if not _unlink(child, inner):
                                os.close(_open(child, inner))
                                number += 1
                                target = f"{prefix}-{number}"
                                os.rename(child, target, src_dir_fd=inner, dst_dir_fd=root)
                    finally:
                        os.close(inner)
                    os.rmdir(name, dir_fd=root)
        finally:
            os.close(root)
        os.rmdir(path)


def _unlink(name: str, directory: int) -> bool:
    """Remove a file; False when it is a directory."""
    try:
        os.unlink(name, dir_fd=directory)
    except (IsADirectoryError, PermissionError):
        return False
    return True


def _open(name: str, directory: int) -> int:
    # A locked one belongs to its snippet's user, which is ours or one that we are root to.
    os.chmod(name, 0o700, dir_fd=directory)
    return os.open(name, _OPEN, dir_fd=directory)
