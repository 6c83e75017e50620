"""Models by name, with the real client against a small hub on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from areal_gym.models.hub import is_hub_name

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": json.dumps({"model_type": "qwen3"}).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 40,
    "pytorch_model.bin": b"never fetched",
    "modeling.py": b"raise SystemExit",
}


class SmallHub(BaseHTTPRequestHandler):
    """Answers what the hub's client asks of one model; one is gated, all others are missing."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.requests.append((self.command, self.path))
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/gated"):
            return self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if path.startswith("/api/models/owner/tiny/revision/nowhere"):
            return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/owner/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": name}
                for name, data in FILES.items()
            ]
            return self.reply(200, json.dumps(tree).encode())
        if path.startswith("/api/models/owner/tiny"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            facts = {"_id": "1", "id": "owner/tiny", "sha": SHA, "siblings": siblings}
            facts |= {"private": False, "downloads": 0, "likes": 0, "tags": []}
            return self.reply(200, json.dumps(facts).encode())
        name = path.rpartition("/")[2]
        if path.startswith("/owner/tiny/resolve/") and name in FILES:
            tag = hashlib.sha256(FILES[name]).hexdigest()
            return self.reply(200, FILES[name], {"X-Repo-Commit": SHA, "ETag": f'"{tag}"'})
        return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def reply(self, status, body, headers=()):
        self.send_response(status)
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        """Keep quiet."""


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), SmallHub)
    server.requests = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(model, home, url, only="", **variables):
    """Resolve a name in a process of its own: the client reads its environment on import."""
    code = (
        "import sys\n"
        "from areal_gym.errors import GymError\n"
        "from areal_gym.models.hub import model_from_hub\n"
        "try:\n"
        "    only = {'wanted': sys.argv[2:]} if sys.argv[2:] else {}\n"
        "    print(model_from_hub(sys.argv[1], lambda line: print('said', line), **only))\n"
        "except GymError as error:\n"
        "    print('error', error, *error.hints)\n"
    )
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, model, *only.split()],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def url_of(hub):
    return f"http://127.0.0.1:{hub.server_port}"


def test_a_model_is_downloaded_once_and_only_its_data(hub, tmp_path):
    said, path = resolve("owner/tiny", tmp_path, url_of(hub))
    assert said.startswith("said owner/tiny: downloading 0.00 GB from the Hugging Face hub")
    assert sorted(os.listdir(path)) == ["config.json", "model.safetensors", "tokenizer.json"]
    num_downloads = sum("/resolve/" in route for _, route in hub.requests)
    assert resolve("owner/tiny", tmp_path, url_of(hub)) == [path]
    assert sum("/resolve/" in route for _, route in hub.requests) == num_downloads


def test_a_config_alone_is_downloaded_and_is_no_model_without_the_hub(hub, tmp_path):
    *_, path = resolve("owner/tiny", tmp_path, url_of(hub), only="config.json")
    assert os.listdir(path) == ["config.json"]
    nowhere = "http://127.0.0.1:9"
    assert resolve("owner/tiny", tmp_path, nowhere, only="config.json")[-1] == path
    assert "is not in the cache" in resolve("owner/tiny", tmp_path, nowhere)[-1]
    assert len(os.listdir(resolve("owner/tiny", tmp_path, url_of(hub))[-1])) == 3


def test_without_the_hub_the_cache_is_used(hub, tmp_path):
    *_, path = resolve("owner/tiny", tmp_path, url_of(hub))
    said, again = resolve("owner/tiny", tmp_path, "http://127.0.0.1:9")
    assert said == f"said owner/tiny: from the cache, {path}; the hub cannot be reached"
    assert again == path
    (other,) = resolve("owner/small", tmp_path, "http://127.0.0.1:9")
    assert f"the cache, {tmp_path / 'hub'}, holds: owner/tiny" in other
    *_, offline = resolve("owner/tiny", tmp_path, url_of(hub), HF_HUB_OFFLINE="1")
    assert offline == path


@pytest.mark.parametrize("variables", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_without_hub_and_cache_the_error_says_what_to_type(tmp_path, variables):
    (line,) = resolve("owner/tiny", tmp_path, "http://127.0.0.1:9", **variables)
    assert "owner/tiny is not in the cache, and the Hugging Face hub cannot be reached" in line
    assert f"the cache, {tmp_path / 'hub'}, holds no model" in line
    assert "hf download owner/tiny --local-dir tiny then: engine.model=tiny" in line


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("owner/missing", "is neither a directory here nor a model on the Hugging Face hub"),
        ("owner/gated", "only to those who have accepted its terms"),
        ("owner/tiny@nowhere", "owner/tiny has no revision 'nowhere' on the hub"),
    ],
)
def test_models_that_the_hub_does_not_give_are_errors(hub, tmp_path, model, message):
    (line,) = resolve(model, tmp_path, url_of(hub))
    assert line.startswith("error ")
    assert message in line


def test_names_are_told_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("Qwen/Qwen3-0.6B")
    assert is_hub_name("Qwen/Qwen3-0.6B@main")
    for path in ("./Qwen/Qwen3", "/models/qwen", "qwen", "a/b/c", "runs/../x"):
        assert not is_hub_name(path)
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    assert not is_hub_name("owner/tiny")
