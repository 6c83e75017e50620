"""Dying fork servers and Docker engines are infrastructure failures, never results."""

import asyncio
import contextlib
import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest

from areal_gym.errors import SandboxError
from areal_gym.sandbox import DockerSandbox, ProcessSandbox, SandboxLimits
from areal_gym.sandbox.containers import connect
from areal_gym.sandbox.image import import_host
from tests._support.container_engines import OwnEngine

LONG = SandboxLimits(wall_s=300.0, cpu_s=300.0)
IMAGE = "areal-gym-sandbox:own-engine"
WAIT = "print('begun', flush=True)\nimport time\ntime.sleep(200)"


@pytest.fixture(scope="module")
def own_engine():
    """A separate Docker engine with the image, which tests may kill; DOCKER_HOST names it."""
    pytest.importorskip("docker")
    # A socket's name must be short.
    engine = OwnEngine(Path(tempfile.mkdtemp(prefix="engine-", dir="/tmp")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", engine.host)
        try:
            engine.start()
            with contextlib.closing(connect()) as client:
                import_host(client, IMAGE)
            yield engine
        finally:
            engine.end()


async def until_begun(sandbox, num_calls):
    """Wait until `num_calls` cells execute a snippet."""
    while True:
        cells = [cell for zygote in sandbox.zygotes() for cell in zygote._cells.values()]
        if sum(cell._call is not None and cell._call.has_begun for cell in cells) >= num_calls:
            return
        await asyncio.sleep(0.02)


def test_session_raises_when_its_fork_server_dies_in_a_call():
    async def go():
        async with ProcessSandbox(num_workers=2, limits=LONG) as sandbox:
            session = await sandbox.session()
            await session.run("x = 1")
            call = asyncio.create_task(session.run(WAIT))
            await until_begun(sandbox, 1)
            os.kill(sandbox.zygotes()[0].server.pid, signal.SIGKILL)
            with pytest.raises(SandboxError, match="lost"):
                await call
            # The error is raised once; then the session starts afresh.
            assert (await session.run("'x' in globals()")).value == "False"
            await session.aclose()

    asyncio.run(go())


def test_session_raises_when_its_fork_server_dies_between_calls():
    async def go():
        async with ProcessSandbox(num_workers=2, limits=LONG) as sandbox:
            session, unused = await sandbox.session(), await sandbox.session()
            await session.run("x = 1")
            zygote = sandbox.zygotes()[0]
            os.kill(zygote.server.pid, signal.SIGKILL)
            while zygote.is_alive:
                await asyncio.sleep(0.02)
            with pytest.raises(SandboxError, match="lost"):
                await session.run("x")
            assert (await session.run("'x' in globals()")).value == "False"
            assert (await unused.run("6 * 7")).value == "42"
            await session.aclose()
            await unused.aclose()

    asyncio.run(go())


def test_session_that_exits_between_calls_restarts():
    code = (
        "import os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), os._exit(0)), daemon=True).start()"
    )

    async def go():
        async with ProcessSandbox(num_workers=1, limits=LONG) as sandbox:
            session = await sandbox.session()
            for _ in range(3):
                await session.run(code)
                await session.run("1")
            assert (await session.run("6 * 7")).status != "unavailable"
            await session.aclose()

    asyncio.run(go())


@pytest.mark.slow
# The docker package leaves a socket open when the engine dies while it connects.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_docker_engine_death_in_a_call_is_a_sandbox_error(own_engine):
    async def go():
        async with DockerSandbox(image=IMAGE, num_workers=2, limits=LONG) as sandbox:
            session = await sandbox.session()
            await session.run("x = 1")
            calls = [
                asyncio.create_task(session.run(WAIT)),
                asyncio.create_task(sandbox.run(WAIT)),
            ]
            await until_begun(sandbox, 2)
            await asyncio.to_thread(own_engine.kill)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert [isinstance(outcome, SandboxError) for outcome in outcomes] == [True, True]
            await asyncio.to_thread(own_engine.start)
            assert (await sandbox.run("6 * 7")).value == "42"
            assert (await session.run("'x' in globals()")).value == "False"
            await session.aclose()

    asyncio.run(go())
    gc.collect()


@pytest.mark.slow
def test_docker_runtime_is_chosen_by_name(own_engine):
    async def go():
        async with DockerSandbox(image=IMAGE, num_workers=1, runtime="second-runc") as sandbox:
            assert "runtime second-runc" in (await sandbox.report()).protections
            (value,) = {(await sandbox.run("6 * 7")).value}
            with contextlib.closing(connect()) as client:
                runtimes = {c.attrs["HostConfig"]["Runtime"] for c in client.containers.list()}
        return value, runtimes

    assert asyncio.run(go()) == ("42", {"second-runc"})


@pytest.mark.slow
def test_unknown_docker_runtime_error_lists_the_available(own_engine):
    async def go():
        async with DockerSandbox(image=IMAGE, runtime="no-such-runtime"):
            pass

    with pytest.raises(SandboxError, match=r"no container runtime 'no-such.*runc, .*second-runc"):
        asyncio.run(go())


@pytest.mark.slow
def test_gvisor_runs_calls_children_and_sessions(own_engine):
    if "AREAL_GYM_GVISOR" not in os.environ or "runsc" not in own_engine.runtimes:
        pytest.skip("set AREAL_GYM_GVISOR=1 where runsc is installed: apt-get install runsc")

    async def go():
        async with DockerSandbox(image=IMAGE, num_workers=1, runtime="runsc") as sandbox:
            kernel = await sandbox.run("print(open('/proc/version').read())")
            assert os.uname().release not in kernel.stdout
            child = "import os\nif os.fork() == 0:\n    os._exit(3)\nos.wait()[1] >> 8"
            assert (await sandbox.run(child)).value == "3"
            session = await sandbox.session()
            await session.run("x = 42")
            assert (await session.run("x")).value == "42"
            await session.aclose()

    asyncio.run(go())
