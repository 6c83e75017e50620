"""Graders: reward functions that run in sandbox workers."""

import asyncio
import sys
import time

import pytest

from areal_gym.envs.grading import agrees, is_equal
from areal_gym.errors import EnvError, SandboxError, UsageError
from areal_gym.sandbox import Grader, SandboxLimits, SandboxReport, shared_reports
from areal_gym.sandbox.base import SandboxLevel


@pytest.fixture(scope="module")
def grade():
    """Call a function of tests/_support/graders.py in a worker."""
    with asyncio.Runner() as runner:

        def grade(name, *arguments, on_limit=None, **limits):
            settings = {"limits": SandboxLimits(**{"wall_s": 30.0, "cpu_s": 20.0, **limits})}
            if on_limit is not None:
                settings["on_limit"] = on_limit
            return runner.run(Grader(f"tests._support.graders:{name}", **settings)(*arguments))

        yield grade


def test_grader_arguments_and_results_are_json(grade, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    assert grade("add", 2, 3) == {"sum": 5, "secret": None}
    assert grade("add", "数\0'\"", "\\") == {"sum": "数\0'\"\\", "secret": None}


def test_grader_on_limit_is_the_result_of_expensive_calls(grade):
    assert grade("spin", cpu_s=1, on_limit=0.0) == 0.0
    with pytest.raises(EnvError, match="more than 1 s of processor time"):
        grade("spin", cpu_s=1)


def test_grader_starved_of_processor_time_is_a_sandbox_error(grade):
    with pytest.raises(SandboxError, match="too little processor time"):
        grade("sleep", 60, wall_s=0.5, on_limit=0.0)


def test_grader_errors_name_function_and_reason(grade):
    with pytest.raises(
        EnvError, match=r"tests\._support\.graders:fail failed: KeyError: 'no such answer'"
    ):
        grade("fail")
    with pytest.raises(EnvError, match="not JSON serializable"):
        grade("no_json")
    with pytest.raises(EnvError, match="more than 8,000 characters"):
        grade("talk")
    with pytest.raises(EnvError, match="cannot import name 'missing'"):
        grade("missing")


@pytest.mark.parametrize("name", ["score", "a:b:c", ":f", "a b:f", "a:f()", ""])
def test_invalid_grader_names_are_refused(name):
    with pytest.raises(UsageError, match="does not name a function"):
        Grader(name)


def test_missing_grader_module_is_refused():
    with pytest.raises(UsageError, match="cannot import the package"):
        asyncio.run(Grader("no_such_module_here:f")())


def test_grader_cannot_read_files(grade, tmp_path):
    (tmp_path / "file").write_text("secret")
    with pytest.raises(EnvError, match=r"PermissionError|FileNotFoundError"):
        grade("read", str(tmp_path / "file"))


def test_slow_grader_does_not_block_the_event_loop():
    async def go():
        grader = Grader("tests._support.graders:sleep")
        await grader(0)  # the worker is there
        longest, stop = 0.0, asyncio.Event()

        async def tick():
            nonlocal longest
            while not stop.is_set():
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                longest = max(longest, time.perf_counter() - before)

        ticking = asyncio.create_task(tick())
        assert await grader(1.5) == "awake"
        stop.set()
        await ticking
        return longest

    assert asyncio.run(go()) < 1.0


PAIRS = [
    (r"\frac{x^2-1}{x-1}", "x+1"),
    ("2*x+1", "x+2"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("12", "12.0"),
    ("(1, x+x)", "(1, 2x)"),
    ("blue", "red"),
    (r"x^{9999999}", "x"),
]


def test_algebra_is_graded_in_workers():
    pytest.importorskip("math_verify")
    before = "math_verify" in sys.modules

    async def go():
        verdicts = [await agrees(*pair) for pair in PAIRS]
        return verdicts, await shared_reports()

    verdicts, reports = asyncio.run(go())
    assert ("math_verify" in sys.modules) == before
    assert verdicts == [is_equal(*pair) for pair in PAIRS]
    assert verdicts == [True, False, True, True, True, False, False]
    (report,) = reports
    assert isinstance(report, SandboxReport)
    assert report.level in SandboxLevel


def test_plain_numbers_are_graded_without_a_worker():
    async def go():
        assert await agrees("1/2", "0.5")
        return await shared_reports()

    assert asyncio.run(go()) == []
