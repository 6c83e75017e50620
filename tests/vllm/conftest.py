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
    """Three checkpoints: two of the same shape and different weights, and a smaller one."""
    from importlib import resources

    from areal_gym.models.tiny.checkpoint_files import save_checkpoint
    from areal_gym.models.tiny.decoder import build_decoder
    from areal_gym.models.tiny.decoder_config import DecoderConfig
    from areal_gym.warm_start.starter_policy import build_tokenizer, save_tokenizer

    home = tmp_path_factory.mktemp("served")
    template = resources.files("areal_gym.warm_start").joinpath("chat_template.jinja").read_text()
    tokenizer = build_tokenizer([template, "Make 17 from 3, 4 and 5."], vocab_size=320)
    (home / "tokenizer").mkdir()
    save_tokenizer(tokenizer, home / "tokenizer", max_context=CONTEXT)

    def save(name, seed, hidden_size):
        config = DecoderConfig(
            architecture="qwen3",
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=hidden_size,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # the least that vLLM's kernels for CPUs have
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"),
            pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        )
        decoder = build_decoder(config, seed=seed)
        return save_checkpoint(decoder, home / name, tokenizer_dir=home / "tokenizer")

    return [save("policy-0", 0, 64), save("policy-1", 1, 64), save("smaller", 0, 32)]


@pytest.fixture(scope="session")
def decoders(policies):
    """The first two checkpoints, loaded for comparison."""
    from areal_gym.models.tiny.checkpoint_files import load_checkpoint

    return [load_checkpoint(policy) for policy in policies[:2]]


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
