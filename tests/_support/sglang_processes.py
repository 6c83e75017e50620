"""SGLang's servers in processes of their own: the stand-in, and the real one.

`make test-sglang` installs SGLang into an environment of its own and names it in
AREAL_GYM_SGLANG_VENV; without that variable the real server's tests are skipped.
"""

import contextlib
import os
import re
import sys
from pathlib import Path

import pytest

from areal_gym.engines.sglang import SGLangEngine
from tests._support.server_processes import (
    SERVED_CONTEXT,
    free_port,
    real_command_of,
    running_process,
)

VENV = "AREAL_GYM_SGLANG_VENV"
START_S = 300
ADAPTED = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
LORA = ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", *ADAPTED]
FAKE_FLAGS = ["--context-length", str(SERVED_CONTEXT), "--max-running-requests", "32"]
REAL_FLAGS = [*FAKE_FLAGS, "--dtype", "float32", "--max-total-tokens", "16384"]


def real_command():
    """Return the command of the real server, or None if it is not installed."""
    return real_command_of(VENV, "tests/sglang/serve_cpu.py")


NEEDS_REAL = pytest.mark.skipif(
    real_command() is None, reason="SGLang is not installed here: make test-sglang"
)
KINDS = ["fake", pytest.param("real", marks=[NEEDS_REAL, pytest.mark.slow])]


def version_of(kind):
    """Return the version of the tested SGLang as numbers; the fake has the newest."""
    if kind == "fake":
        return (0, 5, 23)
    packages = Path(os.environ[VENV]).glob("lib/python*/site-packages")
    (metadata,) = next(packages).glob("sglang-*.dist-info")
    return tuple(int(part) for part in re.findall(r"\d+", metadata.name)[:3])


def require_retract(kind):
    """Before 0.5.21 an update kills a server in which requests wait."""
    if version_of(kind) < (0, 5, 21):
        pytest.skip("this SGLang cannot set requests aside")


def command_of(kind):
    """The command that starts a server of this kind, and its arguments."""
    if kind == "fake":
        return [sys.executable, "-m", "areal_gym.engines.sglang.fake"], FAKE_FLAGS
    return real_command(), REAL_FLAGS


@contextlib.contextmanager
def running_server(kind, policy, log, *flags, port=None):
    """Run a server as areal-gym would start it, on a free port; yield its URL and process."""
    command, arguments = command_of(kind)
    port = free_port() if port is None else port
    url = f"http://127.0.0.1:{port}"
    place = ["--model-path", str(policy), "--host", "127.0.0.1", "--port", str(port)]
    words = [*command, *place, *arguments, *flags]
    variables = SGLangEngine.recipe.variables()
    with running_process(words, url, log, variables=variables, start_s=START_S) as process:
        yield url, process
