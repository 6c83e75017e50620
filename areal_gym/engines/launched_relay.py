"""Starts the relay of `weight_relay` as a child process, and ends it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from areal_gym.engines.sglang import process_guard as guard
from areal_gym.errors import EngineError

_SHARED_MEMORY = Path("/dev/shm")


class LaunchedRelay:
    """A relay for the servers of this machine, with a directory of its own.

    It ends when this process ends, however that happens (see `process_guard`), and takes its files
    along.

    Args:
        directory: on a disk, where the files are put if the memory lacks room for them.
        num_bytes: how much room they need; None if unknown.

    Raises:
        EngineError: it did not start.
    """

    def __init__(self, directory: Path, num_bytes: int | None) -> None:
        parent = directory
        if num_bytes is not None and _room(_SHARED_MEMORY) > num_bytes:
            parent = _SHARED_MEMORY
        parent.mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="areal-gym-relay-", dir=parent))
        arguments = ["--directory", str(self.directory), "--port", "0", "--temporary"]
        command = [sys.executable, "-m", "areal_gym.engines.weight_relay", *arguments]
        self._guard = subprocess.Popen(
            [sys.executable, guard.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert self._guard.stdout is not None
        line = self._guard.stdout.readline().decode(errors="replace").strip()
        self.url = line.rpartition(" ")[2]
        if not self.url.startswith("http://"):
            self.close()
            raise EngineError(
                f"the relay for the servers of this machine did not start: {line or 'no output'}",
                hints=["start one: python -m areal_gym.engines.weight_relay --directory DIR"],
            )

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._guard.poll() is None

    def close(self) -> None:
        """End the relay, and remove its files. Idempotent."""
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        if not self._guard.stdin.closed:
            with self._guard.stdin, contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(b"end")
        self._guard.wait()
        self._guard.stdout.close()
        shutil.rmtree(self.directory, ignore_errors=True)  # also when it was killed


def _room(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0
