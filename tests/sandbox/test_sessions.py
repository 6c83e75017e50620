"""Sandbox sessions: interpreters that persist between calls."""

import asyncio

import pytest

from areal_gym.sandbox import SandboxLimits, SandboxStatus

SHORT = SandboxLimits(wall_s=0.5)


@pytest.fixture
def run_in_session(runner, sandbox):
    """Run snippets one after another in one session."""

    def run_in_session(*codes, limits=None):
        async def go():
            session = await sandbox.session()
            results = [await session.run(code, limits=limits) for code in codes]
            await session.aclose()
            await session.aclose()
            return results

        return runner.run(go())

    return run_in_session


def test_names_persist_in_a_session(run_in_session):
    results = run_in_session("x = 3\ndef f(): return x", "x += 1", "f()")
    assert [result.value for result in results] == [None, None, "4"]


def test_error_keeps_the_session_state(run_in_session):
    results = run_in_session("x = 1\nprint('a')", "1/0", "import sys; sys.exit(1)", "x")
    assert [str(result.status) for result in results] == ["ok", "error", "error", "ok"]
    assert [result.stdout for result in results] == ["a\n", "", "", ""]
    assert results[-1].value == "1"


def test_timeout_or_crash_restarts_the_session(run_in_session):
    for end in ("while True: pass", "import os; os._exit(3)", "import ctypes; ctypes.string_at(0)"):
        results = run_in_session("x = 1", end, "'x' in globals()", limits=SandboxLimits(wall_s=2))
        assert not results[1].is_ok
        assert results[2].value == "False"


def test_memory_is_limited_in_each_call(run_in_session):
    limits = SandboxLimits(memory_mb=128, wall_s=20)
    results = run_in_session(
        "x = bytearray(100 << 20)", "y = bytearray(100 << 20)", "del x", "1", limits=limits
    )
    assert [str(result.status) for result in results] == ["ok", "memory", "ok", "ok"]


def test_output_limit_keeps_the_session_state(run_in_session):
    results = run_in_session("x = 1\nprint('a' * 100_000)", "x")
    assert results[0].status is SandboxStatus.OUTPUT
    assert results[1].value == "1"


def test_more_sessions_than_workers(runner, sandbox):
    async def go():
        sessions = [await sandbox.session() for _ in range(24)]
        for i, session in enumerate(sessions):
            assert (await session.run(f"x = {i}")).is_ok
        results = await asyncio.gather(*(session.run("x * x") for session in sessions))
        await asyncio.gather(*(session.aclose() for session in sessions))
        return [result.value for result in results]

    assert runner.run(go()) == [str(i * i) for i in range(24)]


def test_calls_of_one_session_run_in_order(runner, sandbox):
    async def go():
        session = await sandbox.session()
        await session.run("x = []")
        await asyncio.gather(*(session.run(f"x.append({i})") for i in range(5)))
        result = await session.run("x")
        await session.aclose()
        return result.value

    assert runner.run(go()) == "[0, 1, 2, 3, 4]"


def test_output_between_calls_belongs_to_the_next_call(runner, sandbox):
    async def go():
        session = await sandbox.session()
        code = "import threading\nthreading.Timer(0.2, print, ['late'], {'flush': True}).start()"
        await session.run(code)
        await asyncio.sleep(0.6)
        results = [await session.run("print('now')"), await session.run("print('then')")]
        await session.aclose()
        return [result.stdout for result in results]

    assert runner.run(go()) == ["late\nnow\n", "then\n"]
