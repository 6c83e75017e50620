"""A sandbox for a module of tests, on a loop that the tests drive."""

import asyncio

import pytest

from areal_gym.sandbox import ProcessSandbox, SandboxLimits

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
