"""vLLM's servers in processes of their own: the stand-in, and the real one.

`make test-vllm` installs vLLM into an environment of its own and names it in AREAL_GYM_VLLM_VENV;
without that variable the real server's tests are skipped. A real server takes most of a minute to
start, so that one serves all tests.
"""

import contextlib
import sys

import pytest

from areal_gym.engines.vllm import VLLMEngine
from tests._support.server_processes import (
    SERVED_CONTEXT,
    free_port,
    real_command_of,
    running_process,
)

VENV = "AREAL_GYM_VLLM_VENV"
START_S = 400
LIMITS = ["--max-model-len", str(SERVED_CONTEXT), "--max-num-seqs", "32"]
LORA = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
FAKE = [sys.executable, "-m", "areal_gym.engines.vllm.fake_vllm"]


def real_command():
    """Return the command of the real server, or None if it is not installed."""
    return real_command_of(VENV, "tests/vllm/serve_cpu.py")


NEEDS_REAL = pytest.mark.skipif(
    real_command() is None, reason="vLLM is not installed here: make test-vllm"
)
KINDS = ["fake", pytest.param("real", marks=[NEEDS_REAL, pytest.mark.slow])]


@contextlib.contextmanager
def running_server(kind, policy, log, *flags, port=None):
    """Run a server as areal-gym would start it, on a free port; yield its URL and process."""
    port, recipe = str(free_port() if port is None else port), VLLMEngine.recipe
    url = f"http://127.0.0.1:{port}"
    command = FAKE if kind == "fake" else real_command()
    place = [str(policy), "--host", "127.0.0.1", "--port", port]
    words = [*command, *place, *recipe.arguments, *LIMITS, *flags]
    variables = recipe.variables()
    with running_process(words, url, log, variables=variables, start_s=START_S) as process:
        yield url, process
