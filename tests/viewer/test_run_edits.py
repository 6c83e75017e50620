"""Tags, notes and deletion of runs through the viewer's server, and the list that pages ask for."""

import asyncio
import json
import os
import re

import pytest

from areal_gym.errors import DataError, InfrastructureError, UsageError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.run_notes import RunNotes, move_to_trash
from areal_gym.viewer import Catalog
from areal_gym.viewer.run_listing import RunListing
from areal_gym.viewer.safe_paths import read_identity, read_settings
from tests._support.run_dirs import add_step, make_run, metrics, trajectory

server = pytest.importorskip("areal_gym.viewer.viewer_server", reason="starlette is not installed")
OWN = {"origin": "http://127.0.0.1:7576"}


def request(app, method, path, body=b"", headers=None):
    """Status and JSON or text of a request."""
    path, _, query = path.partition("?")
    headers = {"host": "127.0.0.1:7576", **(headers or {})}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "server": ("127.0.0.1", 7576),
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    raw = b"".join(m.get("body", b"") for m in sent[1:])
    with_json = b"application/json" in dict(sent[0]["headers"]).get(b"content-type", b"")
    return sent[0]["status"], json.loads(raw) if with_json else raw.decode()


def post(app, path, body, headers=OWN):
    return request(app, "POST", path, json.dumps(body).encode(), headers)


def listing(app, since=""):
    status, answer = request(app, "GET", f"/api/listing?since={since}")
    assert status == 200
    return answer


@pytest.fixture
def root(tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / name, num_steps=1, num_trajectories=1)
    return tmp_path


def test_tags_and_notes_are_kept_with_the_run(root):
    app = server.make_app(Catalog([root]))
    notes = {"tags": [" base  line", "b", "b", ""], "note": "too high\n<b>"}
    expected = {"tags": ["base line", "b"], "note": "too high\n<b>"}
    assert post(app, "/api/runs/one/notes", notes) == (200, expected)
    one = request(app, "GET", "/api/runs/one")[1]["card"]
    assert {name: one[name] for name in expected} == expected
    assert RunNotes.read(RunDir(root / "one")).tags == expected["tags"]
    assert post(app, "/api/runs/one/notes", {})[0] == 200
    assert not (root / "one" / "notes.json").exists()
    for wrong in ({"tags": "b"}, {"tags": [1]}, {"note": 3}, {"note": "x" * 10_001}, []):
        assert post(app, "/api/runs/one/notes", wrong)[0] == 422
    assert request(app, "POST", "/api/runs/one/notes", b"\xff", OWN)[0] == 422
    assert post(app, "/api/runs/three/notes", {})[0] == 404


def test_damaged_notes_are_reported(root):
    (root / "one" / "notes.json").write_text('{"tags": 3}')
    card = Catalog([root]).run("one").card()
    assert (card["tags"], card["step"]) == ([], 1)
    assert "tags are a list of texts" in card["problems"][0]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:80"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1:7576", "host": "evil.example"},
    ],
)
def test_other_sites_change_nothing(root, headers):
    app = server.make_app(Catalog([root]))
    for method, path in (("POST", "notes"), ("POST", "delete"), ("DELETE", "notes")):
        body = b'{"note": "x"}'
        assert request(app, method, f"/api/runs/one/{path}", body, headers)[0] == 403
    assert (root / "one").exists()
    assert not (root / "one" / "notes.json").exists()


def test_writes_need_the_token_where_reads_do(root):
    app = server.make_app(Catalog([root]), token="s3cret")
    assert post(app, "/api/runs/one/delete", {})[0] == 401
    cookie = {**OWN, "cookie": "areal-gym-viewer=s3cret"}
    assert post(app, "/api/runs/one/delete", {}, cookie)[0] == 200


def test_read_only_viewers_change_nothing(root):
    app = server.make_app(Catalog([root]), is_read_only=True)
    assert listing(app)["is_read_only"]
    for path in ("notes", "delete"):
        status, text = post(app, f"/api/runs/one/{path}", {"note": "x"})
        assert (status, "--read-only" in text) == (403, True)
    assert sorted(path.name for path in root.iterdir()) == ["one", "two"]


def test_deleted_run_lies_in_the_trash(root):
    app = server.make_app(Catalog([root]))
    before = listing(app)
    assert [card["name"] for card in before["cards"]] == ["one", "two"]
    status, answer = post(app, "/api/runs/one/delete", {})
    assert status == 200
    after = listing(app, before["cursor"])
    assert (after["gone"], after["cards"], after["is_whole"]) == (["one"], [], False)
    (trashed,) = (root / ".trash").iterdir()
    assert answer == {"moved_to": str(trashed)}
    trashed.rename(root / "one")  # and back
    assert [card["name"] for card in listing(app, after["cursor"])["cards"]] == ["one"]
    assert post(app, "/api/runs/three/delete", {})[0] == 404


def test_running_run_is_not_deleted(tmp_path):
    path = make_run(tmp_path / "one", num_steps=1, num_trajectories=1, is_finished=False)
    app = server.make_app(Catalog([tmp_path]))
    with RunDir.open(path, "resume"):
        status, answer = post(app, "/api/runs/one/delete", {})
        assert (status, answer["error"]) == (422, "one is running, and is not deleted")
        (path / "summary.json").write_text("{}")  # it looks finished, but is being written
        with pytest.raises(InfrastructureError, match="another process is writing"):
            move_to_trash(RunDir(path))
        (path / "summary.json").unlink()
        with pytest.raises(UsageError, match="running"):
            move_to_trash(RunDir(path))
    assert path.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may move everything")
def test_directory_that_cannot_be_moved_is_named(root):
    root.chmod(0o555)
    try:
        with pytest.raises(InfrastructureError, match="cannot be moved"):
            move_to_trash(RunDir(root / "one"))
    finally:
        root.chmod(0o755)


def test_listing_sends_changes_only(root):
    app = server.make_app(Catalog([root]))
    first = listing(app)
    assert (first["is_whole"], first["num_unread"], len(first["cards"])) == (True, 0, 2)
    assert not any("is_stub" in card for card in first["cards"])
    second = listing(app, first["cursor"])
    assert (second["is_whole"], second["cards"], second["gone"]) == (False, [], [])
    with RunDir.open(root / "two", "resume") as run:
        add_step(run, 2, [trajectory(0, 2)])
        make_run(root / "three", num_steps=1, num_trajectories=1)
        third = listing(app, first["cursor"])
        assert [(card["name"], card["step"]) for card in third["cards"]] == [
            ("two", 2),
            ("three", 1),
        ]
    assert listing(server.make_app(Catalog([root])), third["cursor"])["is_whole"]
    for odd in ("x", "-", "3", first["cursor"] + "9" * 30, "\u0663"):
        assert len(listing(app, odd.encode().hex() if not odd.isascii() else odd)["cards"]) == 3


def test_stubs_are_filled_in_by_later_answers(tmp_path):
    for i in range(6):
        make_run(tmp_path / f"run-{i}", num_steps=1, num_trajectories=1)
        os.utime(tmp_path / f"run-{i}" / "metrics.jsonl", (1e9, 4e9 + i))
    runs = RunListing(Catalog([tmp_path]), lambda run: run.card(), budget_s=0.0)
    answer = runs.changes()
    assert len(answer["cards"]) == 6
    assert [card["name"] for card in answer["cards"] if "is_stub" not in card] == ["run-5"]
    seen = {card["name"]: card for card in answer["cards"]}
    for left in (4, 3, 2, 1, 0):
        answer = runs.changes(answer["cursor"])
        assert (answer["num_unread"], len(answer["cards"])) == (left, 1)
        seen |= {card["name"]: card for card in answer["cards"]}
    assert not any("is_stub" in card for card in seen.values())


def test_card_of_a_long_run_is_made_of_samples(tmp_path):
    path = make_run(tmp_path / "long", num_steps=1, num_trajectories=1, is_finished=False)
    with (path / "metrics.jsonl").open("a") as file:
        for step in range(2, 2001):
            file.write(json.dumps({**metrics(step), "reward/mean": step / 1000}) + "\n")
        file.write('{"step": 2001, "reward/m')
    run = Catalog([path]).run("long")
    card = run.card()
    assert (card["step"], card["reward"], card["problems"]) == (2000, 2.0, [])
    assert len(card["rewards"]) == 60
    assert card["rewards"][1:] == sorted(card["rewards"][1:])
    assert len(run.curves()["step"]) == 2000
    assert run.card()["rewards"][-1] == card["rewards"][-1]


@pytest.mark.parametrize("changes", [{}, {"seed": 7, "env": {"id": "math/gsm8k"}}])
def test_settings_of_a_card_are_those_of_the_file(tmp_path, changes):
    path = make_run(tmp_path / "one", num_steps=1, num_trajectories=1, **changes)
    file = path / "config.yaml"
    quick, full = read_identity(path, file), read_settings(path, file)
    assert quick is not None
    for name in ("steps", "seed", "objective"):
        assert quick[name] == full[name]
    assert quick["env"]["id"] == full["env"]["id"]
    assert quick["trainer"]["algorithm"] == full["trainer"]["algorithm"]
    assert quick["engine"]["model"] == full["engine"]["model"]
    text = file.read_text()
    for odd in ("seed: 010", "seed: 1_0", "seed: 'x'", "seed: &a 3", "seed: [1]"):
        file.write_text(re.sub("^seed: .*$", odd, text, flags=re.MULTILINE))
        assert read_identity(path, file) is None, odd
        assert "seed" in Catalog([path]).run("one").card()


def test_notes_are_checked():
    with pytest.raises(DataError, match="at most 32 tags"):
        RunNotes.from_dict({"tags": [str(i) for i in range(33)]})
