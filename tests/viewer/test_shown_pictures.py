"""Pictures in the viewer, exported pages and reports: from the run's store, and nothing else."""

import hashlib
import json
from dataclasses import replace

import pytest

from areal_gym.images import ImageStore, use_image_store
from areal_gym.report import collect
from areal_gym.report.html import as_html
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.shown_images import inlined, read_shown
from areal_gym.types import ImageRef
from areal_gym.viewer import Catalog
from areal_gym.viewer.export import export
from tests._support.run_dirs import make_run, trajectory
from tests._support.tiny_vision import picture
from tests.viewer.test_viewer_server import ask

server = pytest.importorskip("areal_gym.viewer.viewer_server", reason="starlette is not installed")


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "one"
    make_run(path)
    with use_image_store(tmp_path / "elsewhere") as store:
        part = store.add(picture(1, 96, 64))
        played = trajectory(0)
        spans = (
            replace(played.spans[0], images=(ImageRef(part["sha256"], 0, 1, (1, 2, 2)),)),
            *played.spans[1:],
        )
        content = [{"type": "text", "text": "How many? "}, part]
        messages = ({"role": "user", "content": content}, *played.messages[1:])
        played = replace(played, spans=spans, messages=messages)
        with RunDir.open(path, "resume") as directory:
            directory.save_trajectories([played], name=99)
    return path, part


def test_a_run_keeps_the_pictures_of_what_it_saves(run):
    path, part = run
    assert list(ImageStore(path / "images")) == [part["sha256"]]


def test_pictures_are_served_from_the_store_alone(run):
    path, part = run
    app = server.make_app(Catalog([path]))
    sha256 = part["sha256"]
    status, headers, body = ask(app, f"/api/runs/one/images/{sha256}")
    assert (status, headers["content-type"]) == (200, "image/png")
    assert headers["x-content-type-options"] == "nosniff"
    assert hashlib.sha256(body).hexdigest() == sha256
    for name in ("0" * 64, "..%2f..%2fconfig.yaml", "config.yaml", sha256.upper()):
        assert ask(app, f"/api/runs/one/images/{name}")[0] == 404
    assert ask(app, f"/api/runs/two/images/{sha256}")[0] == 404


def stored(path, raw):
    sha256 = hashlib.sha256(raw).hexdigest()
    file = ImageStore(path / "images").path(sha256)
    file.parent.mkdir(parents=True, exist_ok=True)
    return sha256, file


def test_what_is_no_picture_is_not_served(run, tmp_path):
    path, part = run
    sha256, file = stored(path, b"<script>alert(1)</script>")
    file.write_bytes(b"<script>alert(1)</script>")
    assert read_shown(path, sha256) is None
    secret = tmp_path / "secret.png"
    secret.write_bytes(ImageStore(path / "images").read(part["sha256"]) + b"more")
    sha256, file = stored(path, secret.read_bytes())
    file.symlink_to(secret)
    assert read_shown(path, sha256) is None
    ImageStore(path / "images").path(part["sha256"]).write_bytes(b"changed")
    assert read_shown(path, part["sha256"]) is None


def test_exported_pages_and_reports_have_small_pictures_in_them(run, tmp_path):
    path, part = run
    row = {"messages": [{"content": [part]}]}
    url = inlined(path, row)[part["sha256"]]
    assert url.startswith("data:image/png;base64,")
    page = as_html(collect(RunDir(path)))
    assert f'<img src="{url}" alt="[image 96x64' in page
    assert "img-src data:" in page
    assert export(Catalog([path]), tmp_path / "page.html") > 0
    large, file = stored(path, bytes(2**17))
    file.write_bytes(bytes(2**17))
    assert inlined(path, {"messages": [{"content": [{**part, "sha256": large}]}]}) == {}


def test_files_with_other_contents_are_escaped(run):
    path, part = run
    file = RunDir(path).trajectories_file(99)
    row = json.loads(file.read_text())
    evil = {**part, "sha256": '"><script>alert(1)</script>'}
    row["messages"][0]["content"] = [evil, {"type": "text", "text": "<b>x</b>"}]
    file.write_text(json.dumps(row) + "\n")
    page = as_html(collect(RunDir(path)))
    assert "<script>alert" not in page
    assert "<b>x</b>" not in page
