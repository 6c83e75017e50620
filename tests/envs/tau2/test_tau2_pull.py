"""Pulling tau2-bench data from servers that fail, lack ranges or send other content."""

import asyncio
import hashlib
import json
import threading

import pytest
from aiohttp import web

from areal_gym.cli.app import run
from areal_gym.envs.tau2 import benchmark_data as data
from areal_gym.envs.tau2 import pull
from areal_gym.envs.tau2.benchmark_data import find_data, manifest, pulled_data
from areal_gym.errors import DataError, InfrastructureError

FILES = {
    "tau2/domains/retail/db.json": bytes(range(256)) * 700,
    "tau2/domains/retail/policy.md": "Be kind. \u00e9".encode(),
}


@pytest.fixture
def small_manifest(monkeypatch):
    """A manifest of two small files."""
    facts = {
        "repository": "owner/some-bench",
        "version": "9.9",
        "commit": "c0ffee" * 6,
        "licence": "MIT",
        "files": [
            {"path": path, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
            for path, text in FILES.items()
        ],
    }
    monkeypatch.setattr(data, "manifest", lambda: facts)
    monkeypatch.setattr(pull, "manifest", lambda: facts)
    monkeypatch.setattr(pull, "_WAIT_S", 0.001)
    return facts


class Server:
    """Serves the files on its own port, and records the requests."""

    def __init__(self):
        self.requests = []
        self.has_ranges = True
        self.cut_after = None
        self.failures = []
        self.texts = dict(FILES)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self):
        app = web.Application()
        app.router.add_get("/{owner}/{repository}/{commit}/data/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _answer(self, request):
        path, wanted = request.match_info["path"], request.headers.get("Range")
        self.requests.append((path, wanted))
        if self.failures:
            return web.Response(status=self.failures.pop(0))
        text = self.texts[path]
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.has_ranges else 0
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(text) - start
        await response.prepare(request)
        if self.cut_after is not None and len(text) - start > self.cut_after:
            await response.write(text[start : start + self.cut_after])
            request.transport.abort()
            return response
        await response.write(text[start:])
        return response

    def close(self):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server():
    serving = Server()
    yield serving
    serving.close()


def assert_complete(folder):
    assert {path: (folder / path).read_bytes() for path in FILES} == FILES
    assert not list(folder.rglob("*.part"))


def test_pull_fetches_every_file_once(small_manifest, server, tmp_path):
    seen = []
    folder = pull.pull(tmp_path, base_url=server.url, on_progress=lambda *all: seen.append(all))
    assert_complete(folder)
    total = sum(map(len, FILES.values()))
    assert seen[-1] == ("tau2/domains/retail/policy.md", total, total)
    assert [have for _, have, _ in seen] == sorted(have for _, have, _ in seen)
    pull.pull(tmp_path, base_url=server.url)
    assert len(server.requests) == 2


def test_interrupted_download_is_resumed(small_manifest, server, tmp_path):
    server.cut_after = 100_000
    assert_complete(pull.pull(tmp_path, base_url=server.url))
    first, second, _ = server.requests
    assert first[1] is None
    assert second[1].startswith("bytes=")
    assert second[1] != "bytes=0-"


def test_server_without_ranges_is_supported(small_manifest, server, tmp_path):
    part = tmp_path / "tau2/domains/retail/db.json.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"old rubbish")
    server.has_ranges = False
    assert_complete(pull.pull(tmp_path, base_url=server.url))


def test_partial_file_with_other_content_is_discarded(small_manifest, server, tmp_path):
    part = tmp_path / "tau2/domains/retail/db.json.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"old rubbish")
    assert_complete(pull.pull(tmp_path, base_url=server.url))


def test_server_errors_are_retried(small_manifest, server, tmp_path):
    server.failures = [503, 502]
    assert_complete(pull.pull(tmp_path, base_url=server.url))


def test_wrong_checksum_is_refused(small_manifest, server, tmp_path):
    server.texts["tau2/domains/retail/policy.md"] = "Be mean. \u00e9".encode()
    with pytest.raises(InfrastructureError, match="checksum") as caught:
        pull.pull(tmp_path, base_url=server.url)
    assert "--base-url" in " ".join(caught.value.hints)
    assert not (tmp_path / "tau2/domains/retail/policy.md").exists()


def test_damaged_file_is_fetched_again(small_manifest, server, tmp_path):
    pull.pull(tmp_path, base_url=server.url)
    (tmp_path / "tau2/domains/retail/policy.md").write_text("changed")
    assert_complete(pull.pull(tmp_path, base_url=server.url))


def test_unreachable_server_is_an_error(small_manifest, tmp_path):
    with pytest.raises(InfrastructureError, match="cannot fetch"):
        pull.pull(tmp_path, base_url="http://127.0.0.1:9")


def test_pull_command_stores_data_where_environments_look(
    small_manifest, server, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path))
    monkeypatch.delenv("TAU2_DATA_DIR", raising=False)
    with pytest.raises(DataError):
        find_data()
    assert run(["data", "pull", "tau2", "--base-url", server.url]) == 0
    folder = capsys.readouterr().out.strip()
    assert folder == str(pulled_data())
    assert str(find_data()) == folder
    assert run(["data", "pull", "tau3"]) == 2


def test_manifest_lists_every_domain_file():
    paths = {row["path"] for row in manifest()["files"]}
    assert len(manifest()["commit"]) == 40
    for domain in ("retail", "airline", "telecom"):
        assert f"tau2/domains/{domain}/tasks.json" in paths
        assert f"tau2/domains/{domain}/split_tasks.json" in paths
    assert all(len(row["sha256"]) == 64 and row["bytes"] > 0 for row in manifest()["files"])
    json.dumps(manifest())


def test_missing_data_error_has_hints(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path))
    monkeypatch.delenv("TAU2_DATA_DIR", raising=False)
    with pytest.raises(DataError) as caught:
        find_data()
    hints = " ".join(caught.value.hints)
    assert "areal-gym data pull tau2" in hints
    assert "TAU2_DATA_DIR" in hints
    assert "data_dir=" in hints
    with pytest.raises(DataError, match=r"holds no tau2/domains"):
        find_data(tmp_path)
