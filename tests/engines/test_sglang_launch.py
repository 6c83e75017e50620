"""The engine starts SGLang servers itself, restarts and ends them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.servers.launch import LaunchedServer
from areal_gym.engines.sglang import FakeSGLangServer, SGLangEngine
from areal_gym.errors import EngineError
from tests._support.sglang_servers import ask, publish, until

FAKE = [sys.executable, "-m", "areal_gym.engines.sglang.fake"]
STUB = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""
"""A server that starts quickly, is healthy and has a child process, as SGLang has."""
SCRIPTED = """
import asyncio
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.sglang import FakeSGLangServer

async def serve():
    port = int(sys.argv[sys.argv.index("--port") + 1])
    async with FakeSGLangServer(ScriptedEngine([]), port=port):
        await asyncio.Event().wait()

asyncio.run(serve())
"""
"""A server without a model, which starts without torch."""


def members_of(group):
    """Return the running processes of a process group."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            pids.append(int(stat.parent.name))
    return pids


def wait_until_gone(group):
    deadline_s = time.monotonic() + 10
    while members_of(group):
        assert time.monotonic() < deadline_s, members_of(group)
        time.sleep(0.02)


def test_engine_starts_restarts_and_ends_servers(tiny_policy, tmp_path):
    async def scenario():
        engine = SGLangEngine(
            tiny_policy,
            command=FAKE,
            server_args="--context-length 128 --ignored-by-the-fake 1",
            log_dir=tmp_path,
            health_interval_s=0.05,
            grace_s=60,
        )
        try:
            await engine.start()
            assert engine.max_context == 122
            (member,) = engine.servers
            group = member.process.process_group
            assert len((await ask(engine, 8)).token_ids) <= 8
            await publish(engine, 1, tiny_policy)

            (server,) = set(members_of(group)) - {group}
            os.kill(server, signal.SIGKILL)
            generation = await ask(engine, 8)
            assert set(generation.versions) == {1}
            assert engine.stats.num_relaunches == 1
            assert engine.stats.num_servers_lost == 1
            wait_until_gone(group)
            group = member.process.process_group
            assert members_of(group)
        finally:
            await engine.aclose()
        wait_until_gone(group)
        assert "exit code -9" in (tmp_path / "sglang-0.log").read_text()

    asyncio.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_server_ends_with_its_guard(tmp_path):
    """A guard that is killed, for want of memory say, leaves no server that nothing would end."""

    async def scenario():
        stub = tmp_path / "server.py"
        stub.write_text("import sys" + SCRIPTED)
        server = LaunchedServer(
            tmp_path, recipe=SGLangEngine.recipe, command=[sys.executable, str(stub)]
        )
        await server.start()
        group = server.process_group
        assert len(members_of(group)) == 2
        os.kill(group, signal.SIGKILL)  # the guard leads the group
        wait_until_gone(group)
        assert not server.is_running
        await server.aclose()

    asyncio.run(scenario())


def test_server_exit_at_start_is_an_error_with_its_last_output(tiny_policy):
    async def scenario():
        engine = SGLangEngine(
            tiny_policy, command=[sys.executable, "-c", "print('no GPU here'); exit(3)"]
        )
        with pytest.raises(EngineError, match="ended while it was starting") as caught:
            await engine.start()
        await engine.aclose()
        assert "no GPU here" in caught.value.hints
        log = Path(caught.value.hints[0].removeprefix("its log: "))
        assert "exit code 3" in log.read_text()
        log.unlink()

    asyncio.run(scenario())


def test_missing_server_command_is_named(tiny_policy, tmp_path):
    async def scenario():
        server = LaunchedServer(
            tiny_policy, recipe=SGLangEngine.recipe, command="no-such-program", log=tmp_path / "log"
        )
        with pytest.raises(EngineError, match="no-such-program"):
            await server.start()
        await server.aclose()

    asyncio.run(scenario())


def test_server_that_never_serves_is_ended(tiny_policy, tmp_path):
    async def scenario():
        server = LaunchedServer(
            tiny_policy,
            recipe=SGLangEngine.recipe,
            command=[sys.executable, "-c", "import time; time.sleep(60)"],
            log=tmp_path / "log",
            start_timeout_s=0.3,
        )
        with pytest.raises(EngineError, match=r"did not serve within 0\.3 s"):
            await server.start()
        group = server.process_group
        assert members_of(group)
        await server.aclose()
        assert not members_of(group)

    asyncio.run(scenario())


def test_closing_ends_all_child_processes_and_removes_the_log(tiny_policy, tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)

    async def scenario():
        server = LaunchedServer(
            tiny_policy, recipe=SGLangEngine.recipe, command=[sys.executable, stub]
        )
        await server.start()
        group = server.process_group
        assert len(members_of(group)) == 3
        await server.aclose()
        await server.aclose()
        assert not members_of(group)
        assert not server.is_running
        assert not server.log.exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_launched_server_does_not_outlive_its_parent(tmp_path, number):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    script = f"""
import asyncio, sys
from pathlib import Path
from areal_gym.engines.servers.launch import LaunchedServer
from areal_gym.engines.sglang import SGLangEngine

async def main():
    command = [sys.executable, {str(stub)!r}]
    log = Path({str(tmp_path / "log")!r})
    server = LaunchedServer(Path("p"), recipe=SGLangEngine.recipe, command=command, log=log)
    await server.start()
    print(server.process_group, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with parent:
        group = int(parent.stdout.readline())
        assert len(members_of(group)) == 3
        parent.send_signal(number)
        parent.wait()
    wait_until_gone(group)


def test_server_that_keeps_dying_is_not_restarted_again(tiny_policy, tmp_path):
    flag = tmp_path / "started"
    stub = tmp_path / "stub.py"
    stub.write_text(
        f"import pathlib, sys\n"
        f"if pathlib.Path({str(flag)!r}).exists(): sys.exit('again')\n"
        f"pathlib.Path({str(flag)!r}).touch()\n" + SCRIPTED
    )

    async def scenario():
        engine = SGLangEngine(
            tiny_policy,
            command=[sys.executable, stub],
            log_dir=tmp_path,
            health_interval_s=0.02,
            grace_s=1.0,
        )
        await engine.start()
        group = engine.servers[0].process.process_group
        for server in set(members_of(group)) - {group}:
            os.kill(server, signal.SIGKILL)
        with pytest.raises(EngineError) as caught:
            await ask(engine, 8)
        assert "again" in caught.value.hints
        await until(lambda: engine.stats.num_relaunches == 3)
        await asyncio.sleep(0.2)
        assert engine.stats.num_relaunches == 3
        await engine.aclose()

    asyncio.run(scenario())


def test_addresses_of_ipv6_have_brackets():
    server = LaunchedServer(Path("policy"), recipe=SGLangEngine.recipe, host="::1", port=30000)
    assert server.url == "http://[::1]:30000"
    assert FakeSGLangServer(ScriptedEngine([]), host="::1", port=30000).url == server.url
