"""Filters of what an agent leaves behind, with archives as a hostile agent would make them."""

import io
import os
import tarfile

from areal_gym.envs.harbor import archives
from areal_gym.envs.harbor.archives import CarriedFiles, pack_folders
from areal_gym.envs.harbor.task_toml import Artifact

OUT = [Artifact(source="/app/out")]


def archive(*members):
    """Return an archive of (name, data or attributes)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, given in members:
            entry = tarfile.TarInfo(name)
            data = b""
            if isinstance(given, bytes):
                data, entry.size = given, len(given)
            else:
                for key, value in given.items():
                    setattr(entry, key, value)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def carried(*members, artifacts=OUT, root="/app/out", written=None):
    files = CarriedFiles(artifacts, written=written)
    files.add(archive(*members), root)
    with tarfile.open(fileobj=io.BytesIO(files.finish())) as tar:
        return {member.name: member for member in tar}, files


def link(target, type=tarfile.SYMTYPE):
    return {"type": type, "linkname": target}


def test_links_that_lead_out_are_left_out_and_named():
    members, files = carried(
        ("app/out", {"type": tarfile.DIRTYPE, "mode": 0o755}),
        ("app/out/a", b"text"),
        ("app/out/near", link("a")),
        ("app/out/up", link("../../tests/expected")),
        ("app/out/far", link("/tests/expected")),
        ("app/out/hard", link("tests/expected", tarfile.LNKTYPE)),
        ("app/out/second", link("app/out/a", tarfile.LNKTYPE)),
    )
    assert set(members) == {"app/out", "app/out/a", "app/out/near", "app/out/second"}
    assert [line.split(":")[0] for line in files.left_out] == [
        "/app/out/up",
        "/app/out/far",
        "/app/out/hard",
    ]
    # The artifact itself may not be a link, wherever it leads.
    members, files = carried(("app/out", link("b")))
    assert not members
    assert "link" in files.left_out[0]


def test_devices_and_set_user_id_bits_do_not_travel():
    members, files = carried(
        ("app/out/tool", {"mode": 0o6755, "uid": 7}),
        ("app/out/pipe", {"type": tarfile.FIFOTYPE}),
        ("app/out/disk", {"type": tarfile.BLKTYPE, "devmajor": 8}),
    )
    assert set(members) == {"app/out/tool"}
    assert members["app/out/tool"].mode == 0o755
    assert members["app/out/tool"].uid == 7
    assert len(files.left_out) == 2


def test_files_that_run_by_themselves_travel_only_by_their_exact_path():
    planted = ("conftest.py", "sitecustomize.py", "x.pth", "python3", "pytest.ini")
    members, files = carried(*((f"app/out/{name}", b"evil") for name in planted))
    assert not members
    assert len(files.left_out) == len(planted)
    declared = [Artifact(source="/app/out/conftest.py")]
    members, _ = carried(
        ("app/out/conftest.py", b"mine"), artifacts=declared, root="/app/out/conftest.py"
    )
    assert set(members) == {"app/out/conftest.py"}


def test_paths_of_tests_and_rewards_never_travel():
    everything = [Artifact(source="/")]
    members, _ = carried(
        ("tests/test.sh", b"echo 1"),
        ("logs/verifier/reward.txt", b"1"),
        ("solution/solve.sh", b""),
        ("logs/artifacts/note", b"fine"),
        ("app/../tests/other", b""),
        artifacts=everything,
        root="/",
    )
    assert set(members) == {"logs/artifacts/note"}


def test_only_what_was_written_is_carried_where_it_is_known():
    members, files = carried(
        ("app/out/old", b"as in the image"),
        ("app/out/new/deep", b"text"),
        ("app/out/new/__pycache__/x.pyc", b""),
        written=frozenset({"/app/out/new"}),
    )
    assert set(members) == {"app/out/new/deep"}
    assert files.texts == {"/app/out/new/deep": "text"}


def test_excluded_patterns_are_left_out():
    members, _ = carried(
        ("app/out/a.log", b""),
        ("app/out/deep/b.log", b""),
        ("app/out/cache/c.txt", b""),
        ("app/out/d.txt", b""),
        artifacts=[Artifact(source="/app/out", exclude=["*.log", "cache"])],
    )
    assert set(members) == {"app/out/d.txt"}


def test_too_many_files_or_bytes_are_absent_and_named(monkeypatch):
    monkeypatch.setattr(archives, "MOST_FILES", 3)
    members, files = carried(*((f"app/out/{n}", b"") for n in range(4)))
    assert not members
    assert "/app/out: more than" in files.left_out[0]
    monkeypatch.setattr(archives, "MOST_BYTES", 10)
    files = CarriedFiles(OUT)
    files.add(archive(("app/out/small", b"1")), "/app/out")
    files.add(archive(("app/out/large", b"1" * 11)), "/app/out")
    assert set(files.texts) == {"/app/out/small"}
    files.add(archive(("app/out/cut", b"1"))[:1024], "/app/out")
    assert len(files.left_out) == 2


def test_a_thousand_files_are_carried():
    members, files = carried(*((f"app/out/{n}", b"x") for n in range(1_000)))
    assert len(members) == 1_000
    assert not files.left_out


def test_many_refusals_are_counted():
    _, files = carried(*((f"app/out/{n}", link("/etc")) for n in range(100)))
    assert len(files.left_out) == 9
    assert files.left_out[-1] == "and 92 more"


def test_folders_of_a_task_are_packed_as_root_with_scripts_that_run(tmp_path):
    for name, text, mode in (("one/test.sh", "1", 0o600), ("two/a.py", "2", 0o644)):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text(text)
        file.chmod(mode)
    (tmp_path / "two" / "test.sh").write_text("later")
    os.link(tmp_path / "two" / "a.py", tmp_path / "two" / "b.py")
    raw = pack_folders([tmp_path / "one", tmp_path / "two"])
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        tar.extractall(tmp_path / "out", filter="tar")
        owners = {(member.uid, member.gid, member.uname) for member in tar}
    assert owners == {(0, 0, "")}
    assert (tmp_path / "out" / "test.sh").read_text() == "later"
    assert (tmp_path / "out" / "test.sh").stat().st_mode & 0o111
    assert (tmp_path / "out" / "b.py").read_text() == "2"
