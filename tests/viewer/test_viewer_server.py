"""What the server answers, and to whom; tested without a browser."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from areal_gym.cli.app import run as run_program
from areal_gym.errors import DataError, InfrastructureError, NothingToDoError, UnknownIdError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.trajectory_files import TrainedFile, TrajectoryFile
from areal_gym.utils.http_servers import addresses
from areal_gym.viewer import Catalog
from tests._support.run_dirs import add_step, make_run, trajectory

server = pytest.importorskip("areal_gym.viewer.viewer_server", reason="starlette is not installed")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    make_run(path / "one")
    make_run(path / "two", num_steps=1)
    return path


def ask(app, path, *, host="127.0.0.1:7576", cookie=None):
    """Status, headers and body of a GET."""
    path, _, query = path.partition("?")
    headers = [(b"host", host.encode())]
    if cookie:
        headers.append((b"cookie", cookie.encode()))
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": headers,
        "server": ("127.0.0.1", 7576),
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    answered = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(m.get("body", b"") for m in sent[1:])


def read(app, path):
    status, _, body = ask(app, path)
    assert status == 200, body
    return json.loads(body)


def test_routes_return_the_run(root):
    app = server.make_app(Catalog([root]))
    cards = read(app, "/api/runs")
    assert [(card["name"], card["step"], card["status"]) for card in cards] == [
        ("one", 3, "finished"),
        ("two", 1, "finished"),
    ]
    about = read(app, "/api/runs/one")
    assert about["settings"]["steps"] == 3
    assert about["files"] == ["step-000001", "step-000002", "step-000003"]
    curves = read(app, "/api/runs/one/curves?after=1")
    assert curves["step"] == [2, 3]
    assert curves["columns"]["reward/mean"] == [0.3, 0.35]
    page = read(app, "/api/runs/one/step-000002?start=4&limit=2")
    assert not page["is_last"]
    assert len(read(app, "/api/runs/one/step-000002")["columns"]["id"]) == 16
    assert page["columns"]["id"] == ["g0001-0", "g0001-1"]
    assert page["columns"]["staleness"] == [0, 1]
    assert set(page["columns"]["advantage"]) <= {0.5, -0.5}
    assert read(app, "/api/runs/one/step-000002/search?q=%22PYTHON") == []
    assert read(app, "/api/runs/one/step-000002/search?q=IS%2011%20%2B") == [11]
    one = read(app, "/api/runs/one/step-000002/5")
    assert one["messages"][1]["content"] == "How much is 5 + 2?"
    assert len(one["trained"]["logprobs"]) == one["num_policy_tokens"] == 6
    assert one["texts"] == {}  # the run keeps no tokenizer


def test_content_security_policy_forbids_remote_and_inline_code(root):
    app = server.make_app(Catalog([root]))
    status, headers, body = ask(app, "/")
    assert status == 200
    assert b"/static/app.js" in body
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    for name in ("app.js", "style.css"):
        status, headers, body = ask(app, f"/static/{name}")
        assert status == 200
        assert headers["content-security-policy"] == policy
        assert b"http" not in body.replace(b"http://www.w3.org/2000/svg", b"")


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/three",
        "/api/runs/one/step-000009",
        "/api/runs/one/..%2Fconfig",
        "/api/runs/one/../../one/step-000001/0",
        "/api/runs/one/step-000001/99",
        "/static/nothing.js",
        "/static/../catalog.py",
        "/static/__init__.py",
    ],
)
def test_unknown_paths_are_not_found(root, path):
    assert ask(server.make_app(Catalog([root])), path)[0] == 404


def test_dns_rebinding_is_refused(root):
    app = server.make_app(Catalog([root]))
    assert ask(app, "/api/runs", host="evil.example:7576")[0] == 403
    assert ask(app, "/api/runs", host="localhost:7576")[0] == 200
    assert ask(app, "/api/runs", host="[::1]:7576")[0] == 200


def test_remote_clients_need_the_token_once(root):
    app = server.make_app(Catalog([root]), token="s3cret")
    assert ask(app, "/api/runs", host="10.0.0.7:7576")[0] == 401
    assert ask(app, "/?token=guess", host="10.0.0.7:7576")[0] == 401
    status, headers, _ = ask(app, "/?token=s3cret", host="10.0.0.7:7576")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert ask(app, "/api/runs", host="10.0.0.7:7576", cookie=cookie.split(";")[0])[0] == 200
    assert ask(app, "/api/runs", cookie="areal-gym-viewer=guess")[0] == 401


def test_loopback_hosts_are_recognised():
    for host, is_ours in {
        "127.0.0.1": True,
        "localhost": True,
        "::1": True,
        "0.0.0.0": False,
        "192.168.1.4": False,
        "example.org": False,
        "": False,
    }.items():
        assert addresses.is_loopback(host) == is_ours, host


def test_port_in_use_is_an_error_with_a_hint():
    with (
        addresses.listen("127.0.0.1", 0) as taken,
        pytest.raises(InfrastructureError, match="cannot listen") as caught,
    ):
        addresses.listen("127.0.0.1", taken.getsockname()[1])
    assert "--port 0" in caught.value.hints[0]


def test_partial_utf8_tokens_are_shown(tmp_path):
    path = make_run(tmp_path / "torn", num_steps=1, is_finished=False)
    messages = ({"role": "assistant", "content": "\ud83d"},)
    with RunDir.open(path, "resume") as run:
        add_step(run, 2, [trajectory(0, messages=messages)])
    app = server.make_app(Catalog([path]))
    assert read(app, "/api/runs/torn/step-000002")["is_last"]
    assert read(app, "/api/runs/torn/step-000002/0")["messages"][0]["content"] == "?"


def test_appended_steps_are_read_and_rewound_steps_dropped(tmp_path):
    path = make_run(tmp_path / "run", is_finished=False)
    run = Catalog([path]).run("run")
    assert run.directory.status == "stopped"
    assert run.step == 3
    with RunDir.open(path, "resume") as directory:
        assert run.directory.status == "running"
        add_step(directory, 4, [trajectory(0, 4)])
        with directory.metrics_file.open("a") as torn:
            torn.write('{"step": 5')
        assert run.curves(after=3)["step"] == [4]
        directory.rewind(1)
        assert run.curves()["step"] == [1]
        assert run.file_names() == ["step-000001"]
        with pytest.raises(UnknownIdError):
            run.file("step-000004")
        directory.save_summary({})
    assert run.directory.status == "finished"


def test_trajectory_list_omits_tokens(tmp_path):
    tricky = (
        {"role": "user", "content": ', "spans": [{}]'},
        {"role": "assistant", "content": "ok"},
    )
    wanted = [
        trajectory(0, task=trajectory(0).task.__class__(id="t", data={"spans": [1, 2]})),
        trajectory(1, messages=tricky),
        trajectory(2),
    ]
    file = TrajectoryFile(RunDir(tmp_path).save_trajectories(wanted, name=3))
    assert file.step == 3
    assert [head.summary["id"] for head in file.page()] == [one.id for one in wanted]
    assert [head.summary["tokens"] for head in file.page()] == [6, 6, 6]
    for place, one in enumerate(wanted):
        assert type(one).from_dict(file.read(place)) == one
        assert "spans" not in file.read_head(place)
    assert file.search('"spans": [{}]') == [1]


def test_damaged_file_is_named(tmp_path):
    (tmp_path / "step-000001.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"step-000001.*line 1 is not a trajectory"):
        TrajectoryFile(tmp_path / "step-000001.jsonl").page()


def test_branches_of_a_trajectory_are_merged(tmp_path):
    row = {"trajectory": 4, "advantage": 0.5, "advantages": [0.5, 0.5], "logprobs": [-1.0, -2.0]}
    other = {**row, "advantages": [0.25], "logprobs": [-3.0]}
    RunDir(tmp_path).save_trained([row, other], step=1)
    found = TrainedFile(RunDir(tmp_path).trained_dir / "step-000001.jsonl")
    assert [found.advantage(place) for place in (3, 4, 5)] == [None, 0.5, None]
    assert found.read(4) == {"advantages": [0.5, 0.5, 0.25], "logprobs": [-1.0, -2.0, -3.0]}
    assert found.read(0) is None


def test_runs_with_equal_names_are_distinguished(tmp_path):
    for place in ("a", "b"):
        make_run(tmp_path / place / "run", num_steps=1, num_trajectories=1)
    catalog = Catalog([tmp_path / "a", tmp_path / "b"])
    assert [run.name for run in catalog.runs()] == ["run", "run~2"]
    assert catalog.run("run~2").path == tmp_path / "b" / "run"
    assert catalog.run("run").page("step-000001")["is_last"]
    assert catalog.run("run~2").trajectory("step-000001", 0)["id"] == "g0000-0"


def test_view_without_runs_is_refused(tmp_path, capsys):
    with pytest.raises(NothingToDoError, match="no runs in"):
        Catalog([tmp_path])
    assert run_program(["view", str(tmp_path)]) == 5
    assert "areal-gym train" in capsys.readouterr().err


def test_export_writes_a_page(root, tmp_path, capsys):
    file = tmp_path / "page.html"
    assert run_program(["view", str(root / "one"), "--export", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"file": str(file), "bytes": file.stat().st_size, "runs": ["one"]}
    text = file.read_text()
    assert 'src="' not in text
    assert "import {" not in text


def test_public_host_prints_a_token_url_and_ctrl_c_stops(root):
    command = [sys.executable, "-m", "areal_gym", "view", str(root), "--host", "0.0.0.0"]
    with subprocess.Popen(
        [*command, "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ,
    ) as process:
        try:
            assert "/?token=" in process.stdout.readline()
            time.sleep(0.5)  # the server takes the signal over when it has begun
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()
