"""The docker sandbox against a real engine."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from areal_gym.errors import SandboxError, UsageError
from areal_gym.sandbox import DockerSandbox, SandboxLevel, SandboxLimits, SandboxStatus
from areal_gym.sandbox.containers import LABEL
from areal_gym.sandbox.image import build_image
from tests._support.paths import ROOT

LIMITS = SandboxLimits(wall_s=20.0, cpu_s=20.0, memory_mb=256)


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandbox(runner, docker_image):
    sandbox = DockerSandbox(image=docker_image, num_workers=2, limits=LIMITS)
    yield sandbox
    runner.run(sandbox.aclose())


@pytest.fixture
def execute(runner, sandbox):
    def execute(code, **limits):
        chosen = {"wall_s": 20.0, "cpu_s": 20.0, "memory_mb": 256, **limits}
        return runner.run(sandbox.run(code, limits=SandboxLimits(**chosen)))

    return execute


def containers(client, sandbox):
    filters = {"label": f"{LABEL}={sandbox._id}"}
    return client.containers.list(all=True, sparse=True, filters=filters)


def test_docker_call_returns_output_and_value(execute):
    result = execute("print('out')\nimport sys\nprint('err', file=sys.stderr)\n6 * 7")
    assert (result.status, result.stdout, result.stderr, result.value) == (
        SandboxStatus.OK,
        "out\n",
        "err\n",
        "42",
    )
    assert result.peak_memory_mb > 1


def test_docker_report_names_protections(runner, sandbox):
    report = runner.run(sandbox.report())
    assert (report.backend, report.level) == ("docker", SandboxLevel.ISOLATED)
    assert {"container", "read-only root", "no capabilities", "seccomp"} <= set(report.protections)


def test_container_settings(runner, sandbox, docker_client):
    runner.run(sandbox.report())
    # The second worker's container may still be on its way up.
    attributes = next(
        container.attrs
        for listed in containers(docker_client, sandbox)
        if (container := docker_client.containers.get(listed.id)).attrs["State"]["Running"]
    )
    host = attributes["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    status = Path(f"/proc/{attributes['State']['Pid']}/status").read_text()
    assert {"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"} <= set(
        status.splitlines()
    )
    assert host["PidsLimit"] > 0
    assert host["Memory"] == host["MemorySwap"] > 256 << 20
    assert not attributes["Config"]["User"].startswith("0")


def test_container_sees_nothing_of_the_host(execute, tmp_path):
    (tmp_path / "secret").write_text("x")
    tmp_path.chmod(0o777)
    assert execute(f"open({str(tmp_path / 'secret')!r})").status is SandboxStatus.ERROR
    assert execute("open('/file', 'w')").status is SandboxStatus.ERROR
    assert execute("import os; dict(os.environ)").value == "{}"
    assert execute("import os; os.getuid() > 0 and os.getpid() < 100_000").value == "True"
    status = execute("[s for s in open('/proc/self/status') if s.startswith('CapEff')]")
    assert status.value == "['CapEff:\\t0000000000000000\\n']"


def test_docker_snippets_may_fork_and_leave_no_process(execute):
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nprint('parent')"
    )
    assert execute(code).stdout == "parent\n"
    processes = "import os\nlen([p for p in os.listdir('/proc') if p.isdigit()])"
    assert execute(processes).value == "2"
    assert execute("import subprocess\nsubprocess.run(['sh', '-c', 'echo hi'])").stdout == "hi\n"


def test_docker_files_do_not_persist(execute):
    assert execute("open('a', 'w').write('x'); import os; os.listdir()").value == "['a']"
    assert execute("import os; os.listdir(), len(os.listdir('/tmp/areal-gym'))").value == "([], 1)"


def test_docker_memory_limit_covers_all_processes(execute):
    code = "import os, time\nfor i in range(8):\n    if os.fork() == 0:\n"
    code += "        x = bytearray(100 << 20)\n        time.sleep(5)\n"
    code += "for i in range(8): print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)"
    result = execute(code, wall_s=90)
    # The kernel kills processes until the others fit.
    assert result.status is SandboxStatus.MEMORY or "-9" in result.stdout
    assert execute("1").value == "1"


def test_docker_lower_memory_limit_covers_all_processes(execute):
    code = (
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        block = b'x' * (50 << 20)\n"
        "        time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    result = execute(code, memory_mb=100)
    assert result.status == "memory"
    assert execute("print(1)", memory_mb=100).stdout == "1\n"


def test_limits_beyond_the_containers_are_refused_by_docker(execute):
    with pytest.raises(UsageError, match=r"asks for memory_mb = 512.*made with 256"):
        execute("1", memory_mb=512)


def test_docker_timeouts_and_output_limit(execute):
    assert execute("while True: pass", wall_s=0.5).status is SandboxStatus.TIMEOUT
    assert execute("while True: print('x' * 999)", wall_s=10).status is SandboxStatus.OUTPUT
    assert execute("1").value == "1"


def test_docker_sessions_keep_names_in_their_own_container(runner, sandbox):
    async def go():
        sessions = [await sandbox.session() for _ in range(3)]
        for number, session in enumerate(sessions):
            await session.run(f"x = {number}")
        values = [(await session.run("x")).value for session in sessions]
        assert (await sandbox.run("'x' in globals()")).value == "False"
        await sessions[0].run("import os; os._exit(1)")
        assert (await sessions[0].run("'x' in globals()")).value == "False"
        for session in sessions:
            await session.aclose()
            await session.aclose()
        return values

    assert runner.run(go()) == ["0", "1", "2"]


def test_docker_sessions_beyond_the_limit_wait(docker_image):
    async def episode(sandbox):
        session = await sandbox.session()
        await session.run("x = 1")
        result = await session.run("x + 1")
        await session.aclose()
        return result.value

    async def go():
        async with DockerSandbox(image=docker_image, num_workers=1, max_sessions=2) as sandbox:
            return await asyncio.gather(*(episode(sandbox) for _ in range(6)))

    assert asyncio.run(go()) == ["2"] * 6


def test_64_concurrent_docker_calls(runner, sandbox):
    async def go():
        calls = (sandbox.run(f"print({i})", limits=LIMITS) for i in range(64))
        return await asyncio.gather(*calls)

    assert [result.stdout for result in runner.run(go())] == [f"{i}\n" for i in range(64)]


def test_cancelled_call_releases_its_container(runner, sandbox):
    async def go():
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await sandbox.run("while True: pass", limits=LIMITS)
        assert (await sandbox.run("1")).value == "1"

    runner.run(go())


def test_lost_container_is_replaced(runner, sandbox, docker_client):
    async def go():
        await sandbox.run("1")
        for container in containers(docker_client, sandbox):
            await asyncio.to_thread(container.kill)
        assert (await sandbox.run("2")).value == "2"

    runner.run(go())


def test_containers_are_replaced_after_their_leases(docker_image, monkeypatch):
    monkeypatch.setattr("areal_gym.sandbox.docker._NUM_LEASES", 2)

    async def go():
        async with DockerSandbox(image=docker_image, num_workers=1) as sandbox:
            pids = set()
            for _ in range(12):
                assert (await sandbox.run("1")).is_ok
                pids |= {zygote.server.pid for zygote in sandbox.zygotes()}
            return pids

    assert len(asyncio.run(go())) > 3


def open_files():
    """Return the target of each open descriptor; `listdir`'s own one is closed by then."""
    gc.collect()
    targets = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return targets


def test_closing_docker_sandbox_leaves_no_container_or_descriptor(docker_image, docker_client):
    async def go():
        sandbox = DockerSandbox(image=docker_image, num_workers=2)
        async with sandbox:
            session = await sandbox.session()
            await session.run("x = 1")
            await sandbox.run("print(1)")
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.run("1")
        return sandbox

    asyncio.run(go())
    before = open_files()
    sandbox = asyncio.run(go())
    assert open_files() == before
    assert containers(docker_client, sandbox) == []


OWNER = """
import asyncio, sys
from areal_gym.sandbox import DockerSandbox
async def main():
    sandbox = DockerSandbox(image=sys.argv[1], num_workers=1)
    session = await sandbox.session()
    await session.run("import time")
    while sandbox._tasks:
        await asyncio.sleep(0.05)
    print(sandbox._id, flush=True)
    await session.run("time.sleep(600)")
asyncio.run(main())
"""


def test_killing_the_owner_removes_its_containers(docker_image, docker_client):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", OWNER, docker_image]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as owner:
        filters = {"label": f"{LABEL}={owner.stdout.readline().strip()}"}
        listed = docker_client.containers.list(sparse=True, filters=filters)
        assert listed
        owner.send_signal(signal.SIGKILL)
    for _ in range(200):
        if not docker_client.containers.list(all=True, sparse=True, filters=filters):
            return
        time.sleep(0.05)
    raise AssertionError("containers are left")


def test_leftovers_of_a_killed_start_are_removed(docker_image, docker_client, monkeypatch):
    place = Path(tempfile.mkdtemp())  # `tmp_path` is too long for a socket's name
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.setattr("areal_gym.sandbox.containers._ABANDONED_S", -10.0)
    (place / "areal-gym-container-x" / "socket").mkdir(parents=True)
    docker_client.containers.create(docker_image, ["python3"], labels={LABEL: "killed"})

    async def go():
        async with DockerSandbox(image=docker_image, num_workers=1):
            pass

    asyncio.run(go())
    filters = {"label": f"{LABEL}=killed"}
    assert docker_client.containers.list(all=True, sparse=True, filters=filters) == []
    assert list(place.iterdir()) == []
    place.rmdir()


def test_missing_image_is_named(docker_client):
    async def go():
        async with DockerSandbox(image="areal-gym-no-such-image"):
            pass

    with pytest.raises(SandboxError, match="no image 'areal-gym-no-such-image'") as caught:
        asyncio.run(go())
    assert any("--from-host" in hint for hint in caught.value.hints)


def test_dockerfile_builds_on_an_existing_image(docker_client, docker_image):
    build_image(docker_client, "areal-gym-sandbox:built", base=docker_image)

    async def go():
        async with DockerSandbox(image="areal-gym-sandbox:built", num_workers=1) as sandbox:
            return await sandbox.run("import numpy\nint(numpy.arange(4).sum())")

    assert asyncio.run(go()).value == "6"
    docker_client.images.remove("areal-gym-sandbox:built")


def test_missing_docker_engine_is_an_error(monkeypatch, tmp_path):
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")

    async def go():
        async with DockerSandbox():
            pass

    with pytest.raises(SandboxError, match="no Docker engine answers at unix:"):
        asyncio.run(go())
