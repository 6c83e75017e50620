"""The store of pictures: by hash, written once, shared by threads and processes."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal_gym.errors import InfrastructureError, UsageError
from areal_gym.images import ImageStore, encode_png, image_store, use_image_store
from tests._support.tiny_vision import picture


def test_equal_pictures_are_one_file(tmp_path):
    store = ImageStore(tmp_path / "images")
    assert not store.directory.exists()
    first = store.add(picture(1, 96, 64))
    again = store.add(encode_png(picture(1, 96, 64)), media_type="image/png")
    assert first == again
    assert (first["width"], first["height"], first["media_type"]) == (96, 64, "image/png")
    assert list(store) == [first["sha256"]]
    assert store.read(first["sha256"]) == encode_png(picture(1, 96, 64))
    assert store.part(first["sha256"]) == first


def test_a_file_is_written_once(tmp_path):
    store = ImageStore(tmp_path)
    sha256 = store.add(picture(1))["sha256"]
    before = store.path(sha256).stat()
    ImageStore(tmp_path).add(picture(1))
    after = store.path(sha256).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_threads_may_add_the_same_picture(tmp_path):
    store = ImageStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda i: store.add(picture(i % 2)), range(64)))
    assert len({part["sha256"] for part in parts}) == 2
    assert sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file()) == [".png"] * 2


def test_missing_and_changed_pictures_are_told(tmp_path):
    store = ImageStore(tmp_path)
    with pytest.raises(InfrastructureError, match="is not in"):
        store.read("0" * 64)
    sha256 = store.add(picture(1))["sha256"]
    store.path(sha256).write_bytes(b"other")
    with pytest.raises(InfrastructureError, match="other bytes"):
        store.read(sha256)


@pytest.mark.parametrize("name", ["../../etc/passwd", "ab", "A" * 64, "", "0" * 65])
def test_only_hashes_are_paths(tmp_path, name):
    with pytest.raises(UsageError, match="not the SHA-256"):
        ImageStore(tmp_path).path(name)


def test_stores_are_copied_and_cleaned_by_hash(tmp_path):
    one, two = ImageStore(tmp_path / "one"), ImageStore(tmp_path / "two")
    parts = [one.add(picture(i)) for i in range(3)]
    two.copy_from(one, [part["sha256"] for part in parts[:2]])
    assert set(two) == {part["sha256"] for part in parts[:2]}
    assert one.remove_all_but([parts[0]["sha256"]]) == 2
    assert list(one) == [parts[0]["sha256"]]


def test_child_processes_use_the_store_of_their_parent(tmp_path):
    with use_image_store(tmp_path / "images") as store:
        part = store.add(picture(1))
        code = "from areal_gym.images import image_store; print(len(image_store().read('%s')))"
        done = subprocess.run(
            [sys.executable, "-c", code % part["sha256"]],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert int(done.stdout) == len(store.read(part["sha256"]))
        assert image_store() is store
    assert image_store() is not store
    assert "AREAL_GYM_IMAGES" not in os.environ
