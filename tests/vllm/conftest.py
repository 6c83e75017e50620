"""Servers to run the suite against: the fake one always, the real one where it is installed.

`make test-vllm` installs vLLM into an environment of its own and names it in AREAL_GYM_VLLM_VENV;
without that variable the real server's tests are skipped. A real server takes most of a minute to
start, so that one serves all tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from areal_gym.engines.vllm import VLLMEngine
from areal_gym.testing.engine_contract import tiny_policies

HERE = Path(__file__).parent
CONTEXT = 512
START_S = 400
LIMITS = ["--max-model-len", str(CONTEXT), "--max-num-seqs", "32"]
LORA = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
FAKE = [sys.executable, "-m", "areal_gym.engines.vllm.fake_vllm"]


def real_command():
    """Return the command of the real server, or None if it is not installed."""
    venv = os.environ.get("AREAL_GYM_VLLM_VENV")
    return None if not venv else [f"{venv}/bin/python", str(HERE / "serve_cpu.py")]


NEEDS_REAL = pytest.mark.skipif(
    real_command() is None, reason="vLLM is not installed here: make test-vllm"
)
REAL = pytest.param("real", marks=[NEEDS_REAL, pytest.mark.slow])


@pytest.fixture(scope="session", params=["fake", REAL])
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
def running_server(kind, policy, log, *flags):
    """Run a server as areal-gym would start it; yield its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    url, recipe = f"http://127.0.0.1:{port}", VLLMEngine.recipe
    command = FAKE if kind == "fake" else real_command()
    place = [str(policy), "--host", "127.0.0.1", "--port", port]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *place, *recipe.arguments, *LIMITS, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**recipe.variables(), "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline_s = time.monotonic() + START_S
        while not _is_up(url):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)
        yield url
    finally:
        # The whole session: the real server has an engine and workers.
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
    log = tmp_path_factory.mktemp(kind) / "server.log"
    with running_server(kind, policies[0], log, *LORA) as url:
        yield url
