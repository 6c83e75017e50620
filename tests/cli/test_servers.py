"""Training against a server and replaying it, from the command line, as real processes."""

import contextlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import torch

from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.slow

SMALL = (
    *("engine.max_context=256", "rollout.max_new_tokens=8", "rollout.batch_groups=2"),
    *("rollout.group_size=2", "eval.num_tasks=2"),
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def served(tiny_policy, tmp_path_factory):
    """The URL of a stand-in server with the tiny policy."""
    port = free_port()
    log = tmp_path_factory.mktemp("served") / "log"
    place = ["--model-path", str(tiny_policy), "--port", str(port), "--context-length", "256"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_gym.engines.sglang.fake", *place],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def areal_gym(tmp_path):
    def call(*argv):
        return subprocess.run(
            [sys.executable, "-m", "areal_gym", *argv],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return call


@pytest.fixture
def train(areal_gym):
    def call(url, policy, *argv):
        what = ("train", "--env", "countdown", "--engine", "sglang", "--steps", "1", *SMALL)
        return areal_gym(*what, "--engine.url", url, f"engine.model={policy}", *argv)

    return call


def test_train_and_replay_with_a_server(served, tiny_policy, areal_gym, train, tmp_path):
    done = train(served, tiny_policy, "--out", "run", "engine.kwargs.take_over=true")
    assert done.returncode == 0, done.stderr
    assert "engine and trainer agree" in done.stderr
    assert "step 1/1" in done.stderr

    again = areal_gym("replay", "run")
    assert again.returncode == 0, again.stderr
    assert "weights: identical to run/checkpoints/step-000001, bit for bit" in again.stdout

    shutil.rmtree(tmp_path / "run" / "trajectories")
    lost = areal_gym("replay", "run")
    assert lost.returncode == 2
    assert "run has lost the trajectories of step 1" in lost.stderr
    assert "run/trajectories" in lost.stderr


def test_replay_of_a_directory_without_run_is_refused(areal_gym, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        found = areal_gym("replay", name)
        assert found.returncode == 2
        assert f"{name} is not a run directory" in found.stderr
        assert "areal-gym list runs" in found.stderr


def test_website_is_not_accepted_as_server(tiny_policy, train):
    class Page(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>Welcome!</html>")

        do_POST = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_address[1]}"
        refused = train(url, tiny_policy)
        page.shutdown()
    assert refused.returncode == 2
    assert f"{url} answers HTML: it is not a server of SGLang" in refused.stderr
    assert "start one: python -m sglang.launch_server" in refused.stderr


def test_unreachable_server_hints_at_the_start_command(tiny_policy, train):
    port = free_port()
    refused = train(f"http://127.0.0.1:{port}", tiny_policy)
    assert refused.returncode == 3
    assert f"no answer from http://127.0.0.1:{port}: Connection refused" in refused.stderr
    start = f"python -m sglang.launch_server --model-path {tiny_policy} --host 127.0.0.1"
    assert f"start the server: {start} --port {port}" in refused.stderr


def test_probe_refuses_another_model_of_the_same_shape(served, tiny_policy, train, tmp_path):
    decoder = load_checkpoint(tiny_policy)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3.0)
    other = save_checkpoint(decoder, tmp_path / "other", tokenizer_dir=tiny_policy)
    refused = train(served, other)
    assert refused.returncode == 2
    assert "engine and trainer are not the same model" in refused.stderr
    assert f"start the servers with the model of engine.model: {other}" in refused.stderr
    assert "engine.kwargs.take_over=true" in refused.stderr


def test_untrainable_policy_is_refused_before_start(tiny_policy, train, tmp_path):
    truncated = train("http://127.0.0.1:9", tiny_policy, "rollout.top_p=0.9")
    assert truncated.returncode == 2
    assert "rollout.top_p = 0.9 cannot be trained with" in truncated.stderr
    assert "areal-gym eval ... rollout.top_p=0.9" in truncated.stderr

    silent = tmp_path / "silent"
    shutil.copytree(tiny_policy, silent)
    (silent / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((silent / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (silent / "tokenizer_config.json").write_text(json.dumps(config))
    refused = train("http://127.0.0.1:9", silent)
    assert refused.returncode == 2
    assert f"no chat template in {silent}" in refused.stderr
    assert "put a chat_template.jinja beside tokenizer.json" in refused.stderr
