"""Whatever is asked of the viewer and lies in a run directory: an answer, and no secrets."""

import asyncio
import json
import os
import random
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.utils.http_servers import addresses
from areal_gym.utils.http_servers.connections import ConnectionLimits
from areal_gym.viewer import Catalog
from tests._support.raw_http import exchange, odd_request, request, statuses
from tests._support.run_dirs import make_run
from tests._support.schema_noise import nested

server = pytest.importorskip("areal_gym.viewer.viewer_server", reason="starlette is not installed")

SECRET = "the-secret-of-another-directory"
ROUTES = {
    "/",
    "/static/{name}",
    "/api/runs",
    "/api/listing",
    "/api/evaluations",
    "/api/evaluations/{id}",
    "/api/evaluations/{id}/images/{sha256}",
    "/api/evaluations/{id}/samples",
    "/api/evaluations/{id}/samples/{place}",
    "/api/runs/{run}/images/{sha256}",
    "/api/runs/{run}/notes",
    "/api/runs/{run}/delete",
    "/api/runs/{run}",
    "/api/runs/{run}/pulse",
    "/api/runs/{run}/curves",
    "/api/runs/{run}/{file}",
    "/api/runs/{run}/{file}/search",
    "/api/runs/{run}/{file}/{place}",
}
NAMES = ("one", "two", "step-000001", "step-000002", "eval", "app.js", "index.html")
ODD = (
    "..", ".", "%2e%2e", "../one", "..%2fone", "%2fetc%2fpasswd", "\0", "²", "-1", "1", "0", "",
    "9" * 400, "1e5", "0x1", "٣", "\ud800", "a" * 2000, "one/../two", "~", "*", "[", "{run}", " ",
    "one:step-0", "one:step-1", "one:x", "step-000001.jsonl", "config.yaml",
    "../config", "%00", "+1", "1_0", "None", "nan",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("viewed")
    make_run(path / "one", num_steps=2, num_trajectories=4)
    make_run(path / "two", num_steps=1, num_trajectories=4)
    return path


def ask_all(app, paths, *, headers=((b"host", b"127.0.0.1"),), method="GET"):
    """Status and body of a request for each path."""

    async def ask(path):
        path, _, query = path.partition("?")
        raw = path.encode("utf-8", "surrogatepass")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": raw,
            "query_string": quote(query, safe="=&%", errors="surrogatepass").encode(),
            "headers": list(headers),
            "server": ("127.0.0.1", 1),
        }
        sent = []

        async def receive():
            return {"type": "http.request", "body": b""}

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)
        return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])

    async def all_of_them():
        return [await ask(path) for path in paths]

    return asyncio.run(all_of_them())


def every_path(names=NAMES[:2]):
    """A path of each route, for each run."""
    return [
        path.replace("{run}", run)
        .replace("{file}", file)
        .replace("{place}", place)
        .replace("{id}", f"{run}:step-0")
        for run in names
        for file in ("step-000001", "step-000002")
        for place in ("0", "3", "9")
        for path in sorted(p for p in ROUTES - {"/static/{name}"} if "{sha256}" not in p)
    ]


def test_every_route_of_the_viewer_is_fuzzed(root):
    app = server.make_app(Catalog([root]))
    assert {route.path for route in app._app.routes} == ROUTES


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_viewer_answers_odd_paths_and_queries(root, seed):
    dice = random.Random(seed)
    app = server.make_app(Catalog([root]))

    def word():
        return dice.choice(NAMES if dice.random() < 0.6 else ODD)

    paths = []
    for _ in range(30):
        path = dice.choice(sorted(ROUTES))
        for name in ("{run}", "{file}", "{place}", "{name}", "{id}", "{sha256}"):
            path = path.replace(name, word())
        keys = dice.sample(("after", "start", "limit", "q", "token", ""), dice.randrange(3))
        paths.append(f"{path}?{'&'.join(f'{key}={word()}' for key in keys)}")
    for path, (status, body) in zip(paths, ask_all(app, paths), strict=True):
        assert status in (200, 303, 307, 404), (path, status, body)
    for method in dice.sample(("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW", ""), 2):
        for path, (status, body) in zip(paths, ask_all(app, paths, method=method), strict=True):
            assert status < 500, (method, path, body)


@pytest.mark.parametrize("token", [None, "sesame"])
def test_viewer_answers_odd_headers(root, token):
    app = server.make_app(Catalog([root]), token=token)
    for host in (b"[", b"[::1", b"]", b"a b", b"\xb2", b"", b"127.0.0.1:x", b"evil.example"):
        for cookie in (b"areal-gym-viewer=\xff", b"=;", b'areal-gym-viewer="\\', b"x=" * 999):
            headers = [(b"host", host), (b"cookie", cookie)]
            ((status, _),) = ask_all(app, ["/api/runs?token=\xff"], headers=headers)
            assert status in (200, 401, 403)
    ((status, _),) = ask_all(app, ["/api/runs"], headers=[])
    assert status in (401, 403)


ODD_LINES = (
    b"{", b"null", b"3", b"[]", b'"x"', b"{}", b"\xff\xfe", b'{"step": "x"}', b'{"step": null}',
    b'{"step": NaN, "reward/mean": NaN}', b'{"step": 1e999}', b'{"step": []}', b'{"step": 1.5}',
    b'{"step": -7, "reward/mean": {"a": 1}}', b'{"step": 3, "reward/mean": "high"}',
    b'{"step": 4, "reward/mean": 1' + b"0" * 4000 + b"}", b'{"step": ' + b"9" * 5000 + b"}",
    nested(100_000).encode(), b'{"step": 2, "x": ' + nested(900).encode() + b"}", b"\0" * 100,
    b'{"step": 5, "sampled": 3, "heldout": []}', b'{"step": 6, "sampled": {"pass@1": "x"}}',
    b'{"id": 1, "task": 5, "messages": 7, "turns": 3, "spans": [1, 2]}', b'{"a": 1, "spans": [',
    b'{"trajectory": [], "advantage": "x", "advantages": [', b"", b"\r\n\r", b"{}\x0b{}\x85{}",
)  # fmt: skip
ODD_YAML = (
    b"- 1", b"a: [", b"\xff", b"3", b"steps: 2020-01-01\nseed: .nan\nenv: []", b"? [1]\n: {2: 3}",
    b"a: &a [1,1,1,1,1,1,1,1,1,1]\n" + b"".join(
        b"%c: &%c [%s]\n" % (65 + i, 65 + i, b",".join([b"*%c" % (64 + i if i else 97)] * 10))
        for i in range(9)
    ),
    b"a: &a [*a]", b"a: " + b"[" * 50_000, b"!!python/object/apply:os.system ['true']", b"\0",
    b"steps: " + b"9" * 5000, b"engine: 3\nenv: {id: {a: b}}\nsteps: [1]\nseed: !!binary aGk=",
)  # fmt: skip
FILES = {
    "metrics.jsonl": ODD_LINES,
    "evaluations.jsonl": ODD_LINES,
    "trajectories/step-000001.jsonl": ODD_LINES,
    "trained/step-000001.jsonl": ODD_LINES,
    "config.yaml": ODD_YAML,
    "summary.json": ODD_LINES,
    "plugins.json": ODD_LINES,
    "notes.json": ODD_LINES,
    "status.json": ODD_LINES,
    "tokenizer.json": ODD_LINES,
}


def _no_constant(name):
    raise AssertionError(f"browsers read no {name}")


ODD_FILE_PATHS = (
    "/api/evaluations",
    "/api/evaluations/one:step-0",
    "/api/evaluations/one:step-0/samples",
    "/api/listing",
    "/api/runs/one",
    "/api/runs/one/pulse",
    "/api/runs/one/curves",
    "/api/runs/one/step-000001",
    "/api/runs/one/step-000001/1",
)


def shown(root, paths, expected=(200, 404, 422)):
    """Bodies of all answers; the list names every run, and the sound one is as it should be."""
    app = server.make_app(Catalog([root]))
    answers = ask_all(app, ["/api/runs", *paths])
    for path, (status, body) in zip(["/api/runs", *paths], answers, strict=True):
        assert status in expected, (path, status, body)
        if status == 200 and path != "/":
            json.loads(body, parse_constant=_no_constant)
    cards = {card["name"]: card for card in json.loads(answers[0][1])}
    assert set(cards) == {"one", "two"}
    assert (cards["two"]["step"], cards["two"]["problems"]) == (1, [])
    return [body for _, body in answers], cards["one"]


@pytest.mark.parametrize("name", FILES)
def test_odd_file_of_one_run_does_not_break_other_runs(tmp_path, name):
    make_run(tmp_path / "one", num_steps=1, num_trajectories=2)
    make_run(tmp_path / "two", num_steps=1, num_trajectories=2)
    file = tmp_path / "one" / name
    valid = file.read_bytes() if file.exists() else b""
    for odd in FILES[name]:
        file.write_bytes(valid + odd + b"\n" + valid)
        shown(tmp_path, ODD_FILE_PATHS)


def test_damaged_metrics_line_is_skipped_and_reported(tmp_path):
    make_run(tmp_path / "one", num_steps=2, num_trajectories=2)
    make_run(tmp_path / "two", num_steps=1, num_trajectories=2)
    file = tmp_path / "one" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"{not json\n" + lines[1])
    _, card = shown(tmp_path, ["/api/runs/one/curves"])
    assert card["step"] == 2
    assert card["problems"] == ["metrics.jsonl: 1 damaged lines were skipped"]


LINKED = (*FILES, "trajectories/leak.jsonl", "trajectories", "trained", "checkpoints/step-000001")


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("kind", ["link", "device", "pipe"])
def test_files_outside_a_run_directory_cannot_be_read(tmp_path, name, kind):
    make_run(tmp_path / "runs" / "one", num_steps=1, num_trajectories=2)
    make_run(tmp_path / "runs" / "two", num_steps=1, num_trajectories=2)
    outside = make_run(tmp_path / "outside", num_steps=1, num_trajectories=2)
    for file in outside.rglob("*"):
        if file.is_file():
            text = file.read_text()
            file.write_text(text.replace("much is", SECRET).replace("tir", SECRET))
    (outside / "metrics.jsonl").write_text(json.dumps({"step": 1, SECRET: 1}) + "\n")
    (outside / "summary.json").write_text(json.dumps({"train_s": 1, "note": SECRET}))
    (outside / "trajectories" / "leak.jsonl").write_bytes(
        (outside / "trajectories" / "step-000001.jsonl").read_bytes()
    )
    (outside / "checkpoints" / "step-000001").mkdir(parents=True)
    link = tmp_path / "runs" / "one" / name
    if link.is_dir():
        link.rename(tmp_path / "moved")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    target = outside / name
    if kind == "pipe":
        os.mkfifo(link)
    else:
        link.symlink_to(target if kind == "link" else Path("/dev/zero"))
    paths = [
        *every_path(),
        "/api/runs/one/leak",
        "/api/runs/one/leak/0",
        "/api/runs/one/leak/search",
    ]
    bodies, _ = shown(tmp_path / "runs", paths)
    assert not any(SECRET.encode() in body for body in bodies)


def test_links_inside_a_run_directory_are_followed(tmp_path):
    make_run(tmp_path / "one", num_steps=1, num_trajectories=2)
    make_run(tmp_path / "two", num_steps=1, num_trajectories=2)
    metrics = tmp_path / "one" / "metrics.jsonl"
    metrics.rename(tmp_path / "one" / "kept.jsonl")
    metrics.symlink_to("kept.jsonl")
    _, card = shown(tmp_path, [])
    assert card["step"] == 1


def test_viewer_survives_odd_http(root):
    dice = random.Random(31)
    limits = ConnectionLimits(header_s=2.0, body_s=2.0, idle_s=2.0)

    async def use():
        with addresses.listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(
                server.serve(server.make_app(Catalog([root])), listener, limits=limits)
            )
            odd = [odd_request(dice, every_path(), [b"", b"x", b"{}"]) for _ in range(150)]
            answers = await asyncio.gather(*(exchange(port, raw, ends=False) for raw in odd))
            for raw, answer in zip(odd, answers, strict=True):
                assert all(status < 500 for status in statuses(answer)), (raw, answer)
            too_much = request("POST", "/api/runs", b"x" * 100_000)
            assert statuses(await exchange(port, too_much, ends=False)) in ([413], [])
            answer = await exchange(port, request("GET", "/api/runs"), ends=False)
            assert statuses(answer) == [200]
            serving.cancel()
            await serving

    asyncio.run(use())
