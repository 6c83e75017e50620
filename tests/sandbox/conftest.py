"""A sandbox for a module of tests, on a loop that the tests drive."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from areal_gym.errors import SandboxError
from areal_gym.sandbox import ProcessSandbox, SandboxLimits
from areal_gym.sandbox.containers import connect
from areal_gym.sandbox.image import import_host

# Generous: the machine may be busy.
LIMITS = SandboxLimits(wall_s=20.0, cpu_s=20.0)


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandbox(runner):
    sandbox = ProcessSandbox(num_workers=2, limits=LIMITS)
    yield sandbox
    runner.run(sandbox.aclose())


@pytest.fixture
def execute(runner, sandbox):
    """Run a snippet in a fresh interpreter."""

    def execute(code, **limits):
        chosen = SandboxLimits(**{"wall_s": 20.0, "cpu_s": 20.0, **limits})
        return runner.run(sandbox.run(code, limits=chosen))

    return execute


SCRIPTS = Path(__file__).parent / "engine"
IMAGE = "areal-gym-sandbox:tests"


@pytest.fixture(scope="session")
def docker_client(tmp_path_factory):
    """A client of the running Docker engine, or of one started for these tests."""
    pytest.importorskip("docker")
    pid_file = tmp_path_factory.mktemp("engine") / "pid"
    try:
        client = connect()
    except SandboxError as error:
        if os.geteuid() != 0 or shutil.which("dockerd") is None:
            pytest.skip(f"{error.message}; {SCRIPTS}/start_engine.sh installs and starts one")
        start = [SCRIPTS / "start_engine.sh", pid_file]
        if subprocess.run(start, capture_output=True, timeout=120).returncode != 0:
            pytest.skip("no Docker engine can be started here")
        client = connect()
    yield client
    client.close()
    subprocess.run([SCRIPTS / "stop_engine.sh", pid_file], check=True, timeout=60)


@pytest.fixture(scope="session")
def docker_image(docker_client):
    """An image of this interpreter."""
    import_host(docker_client, IMAGE)
    return IMAGE
