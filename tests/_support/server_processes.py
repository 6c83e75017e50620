"""Servers in processes of their own: real ones where they are installed, and stand-ins."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
SERVED_CONTEXT = 512
"""The context of servers in tests."""


def real_command_of(variable, script):
    """Return the command of a real server, or None where no variable names its environment."""
    venv = os.environ.get(variable)
    return None if not venv else [f"{venv}/bin/python", str(TREE / script)]


def require_torchvision(variable):
    """Skip the test if a server's environment is older than what reads pictures."""
    venv = Path(os.environ[variable])
    if not any(venv.glob("lib/python*/site-packages/torchvision")):
        pytest.skip(f"no torchvision in {venv}, which pictures need: install it anew")


@contextlib.contextmanager
def running_process(command, url, log, *, variables, start_s):
    """Run a server until the caller has done; yield its process when it serves."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**variables, "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline_s = time.monotonic() + start_s
        while not _is_up(url):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)
        yield process
    finally:
        # The whole session: real servers have workers.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class KeptServer:
    """One server for many tests: whoever asks for it after its end gets a new one.

    Args:
        running: called as `running(log, *flags, port=port)`, it returns a context that yields the
            server's URL and process; a port of None is any that is free.
        home: the directory of the logs.
        flags: further arguments of the server.
    """

    def __init__(self, running, home, *flags):
        self._running, self._home, self._flags = running, home, flags
        self._stack = contextlib.ExitStack()
        self._num_starts = 0
        self.log = self.url = self.process = None

    def started(self, port=None):
        """Return its URL and process; start it if there is none, or it has ended."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.log = self._home / f"server-{self._num_starts}.log"
            self._num_starts += 1
            running = self._running(self.log, *self._flags, port=port)
            self.url, self.process = self._stack.enter_context(running)
        return self.url, self.process

    def started_or_told(self):
        """Return its URL; a server that does not answer is replaced, which a warning tells."""
        if self.process is not None and not _is_up(self.url):
            status, log = self.process.poll(), self.log.read_text(errors="replace")
            # Its end is often the shutdown alone, and the cause far above.
            errors = "\n".join([line[:300] for line in log.splitlines() if "Error: " in line][:20])
            report = f"a server of the tests is lost ({status}):\n{errors}\n\n{log[-2000:]}"
            warnings.warn(report, stacklevel=1)
            self.close()
        return self.started()[0]

    def close(self):
        self._stack.close()


def free_port():
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_up(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
