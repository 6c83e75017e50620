"""Helpers about processes."""

from pathlib import Path


def is_running(pid):
    """Return whether a process runs; zombies, which init reaps late, do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
