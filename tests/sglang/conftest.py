"""Servers to run the suite against: the fake one always, the real one where it is installed.

`make test-sglang` installs SGLang into an environment of its own and names it in
AREAL_GYM_SGLANG_VENV; without that variable the real server's tests are skipped.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from areal_gym.testing.engine_contract import tiny_policies

HERE = Path(__file__).parent
CONTEXT = 512
START_S = 300
ADAPTED = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
LORA = ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", *ADAPTED]
REAL_FLAGS = [
    *("--dtype", "float32", "--context-length", str(CONTEXT)),
    *("--max-total-tokens", "16384", "--max-running-requests", "32"),
]


def real_command():
    """Return the command of the real server, or None if it is not installed."""
    venv = os.environ.get("AREAL_GYM_SGLANG_VENV")
    return None if not venv else [f"{venv}/bin/python", str(HERE / "serve_cpu.py")]


def version_of(kind):
    """Return the version of the tested SGLang as numbers; the fake has the newest."""
    if kind == "fake":
        return (0, 5, 23)
    packages = Path(os.environ["AREAL_GYM_SGLANG_VENV"]).glob("lib/python*/site-packages")
    (metadata,) = next(packages).glob("sglang-*.dist-info")
    return tuple(int(part) for part in re.findall(r"\d+", metadata.name)[:3])


def require_retract(kind):
    """Before 0.5.21 an update kills a server in which requests wait."""
    if version_of(kind) < (0, 5, 21):
        pytest.skip("this SGLang cannot set requests aside")


def fake_command():
    return [sys.executable, "-m", "areal_gym.engines.sglang.fake"]


NEEDS_REAL = pytest.mark.skipif(
    real_command() is None, reason="SGLang is not installed here: make test-sglang"
)
KINDS = ["fake", pytest.param("real", marks=[NEEDS_REAL, pytest.mark.slow])]


def command_of(kind):
    """The command that starts a server of this kind, and its arguments."""
    if kind == "fake":
        return fake_command(), ["--context-length", str(CONTEXT), "--max-running-requests", "32"]
    return real_command(), REAL_FLAGS


@pytest.fixture(scope="session", params=KINDS)
def kind(request):
    """Which server the test runs against."""
    return request.param


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    """Two checkpoints of the same shape and different weights."""
    made = tiny_policies(tmp_path_factory.mktemp("served"), max_context=CONTEXT)
    return [made.first, made.second]


@pytest.fixture(scope="session")
def decoders(policies):
    """The weights of the two checkpoints."""
    from areal_gym.models.tiny.checkpoint_files import load_checkpoint

    return [load_checkpoint(policy) for policy in policies]


@contextlib.contextmanager
def running_server(kind, policy, log, *flags, port=None):
    """Run a server in its own process on a free port; yield its URL and process."""
    command, arguments = command_of(kind)
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    place = ["--model-path", str(policy), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *place, *arguments, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline_s = time.monotonic() + START_S
        while not _is_up(url):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)
        yield url, process
    finally:
        # The whole session: the real server has a scheduler and a detokenizer.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_up(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def server(kind, policies, tmp_path_factory):
    """The URL of one server for all tests of a kind; each test publishes what it needs."""
    flags = LORA if kind == "real" else []
    log = tmp_path_factory.mktemp(kind) / "server.log"
    with running_server(kind, policies[0], log, *flags) as (url, _):
        yield url


class SpareServer:
    """A second server, which a test may kill: the next one that asks then gets a new one."""

    def __init__(self, kind, policy, home):
        self._kind, self._policy, self._home = kind, policy, home
        self._stack = contextlib.ExitStack()
        self._num_starts = 0
        self.url = self.process = None

    def started(self, port=None):
        """Return its URL and process; start it if there is none, or it was killed."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            log = self._home / f"spare-{self._num_starts}.log"
            self._num_starts += 1
            running = running_server(self._kind, self._policy, log, port=port)
            self.url, self.process = self._stack.enter_context(running)
        return self.url, self.process

    def close(self):
        self._stack.close()


@pytest.fixture(scope="session")
def spare(kind, policies, tmp_path_factory):
    """A second server for all tests of a kind; each test publishes what it needs."""
    server = SpareServer(kind, policies[0], tmp_path_factory.mktemp("spare"))
    yield server
    server.close()
