"""Starts a relay (`areal_gym.engines.weight_relay`) as a child process, and ends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from areal_gym.errors import EngineError
from areal_gym.utils.child_python import import_path, python_argv

_SHARED_MEMORY = Path("/dev/shm")


class LaunchedRelay:
    """A relay for the servers of this machine, with its own directory.

    The relay ends, and deletes its files, when this process ends in any way, because its standard
    input is then closed.

    Args:
        directory: a directory on disk for the files, if memory lacks the room.
        num_bytes: the size of the files; None if unknown.

    Raises:
        EngineError: the relay did not start.
    """

    def __init__(self, directory: Path, num_bytes: int | None) -> None:
        parent = directory
        if num_bytes is not None and _room(_SHARED_MEMORY) > num_bytes:
            parent = _SHARED_MEMORY
        parent.mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="areal-gym-relay-", dir=parent))
        arguments = ["--directory", str(self.directory), "--port", "0", "--temporary"]
        self._process = subprocess.Popen(
            python_argv("-m", "areal_gym.engines.weight_relay", *arguments),
            env=os.environ | import_path(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C does not reach it
            bufsize=0,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode(errors="replace").strip()
        self.url = line.rpartition(" ")[2]
        if not self.url.startswith("http://"):
            self.close()
            raise EngineError(
                f"the relay for the servers of this machine did not start: {line or 'no output'}",
                hints=["start one: python -m areal_gym.engines.weight_relay --directory DIR"],
            )

    @property
    def is_running(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the relay, and remove its files. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._process.stdin.closed:
            # Forked children may hold the pipe open, so closing it alone is not enough.
            with self._process.stdin, contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(b"end")
        self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self.directory, ignore_errors=True)  # in case it was killed


def _room(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0
