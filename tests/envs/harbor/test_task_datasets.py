import json
import subprocess

import numpy as np
import pytest

from areal_gym.envs.harbor.task_datasets import find_tasks, task_source
from areal_gym.errors import DataError, NothingToDoError
from tests._support.harbor_tasks import write_files, write_task


def test_folder_of_tasks_is_a_source(tmp_path):
    for name in ("b", "a"):
        write_task(tmp_path / name)
    (tmp_path / "notes").mkdir()

    source, tasks = task_source(tmp_path)

    assert list(tasks) == ["tests/a", "tests/b"]
    assert source.num_tasks("train") == 2
    task = source.at(1, "train")
    assert task.id.startswith("tests/b-")
    assert task.data["name"] == "tests/b"
    assert source.draw(np.random.default_rng(0), "train").data["name"] in tasks
    assert source.notes == (f"{tmp_path}: 0 of 2 tasks are held out",)


def test_one_task_is_a_source(tmp_path):
    source, tasks = task_source(write_task(tmp_path / "one"))

    assert list(tasks) == ["tests/one"]
    assert source.num_tasks("train") == 1


def test_splits_of_a_file(tmp_path):
    for name in ("a1", "a2", "b1"):
        write_task(tmp_path / name)
    (tmp_path / "splits.json").write_text('{"train": ["tests/a*"], "test": ["b1"]}')

    source, _ = task_source(tmp_path)

    assert [source.num_tasks(split) for split in ("train", "test")] == [2, 1]
    assert source.at(0, "test").data["name"] == "tests/b1"
    for content in ('{"dev": []}', '{"test": "b1"}', "[]", "{"):
        (tmp_path / "splits.json").write_text(content)
        with pytest.raises(DataError, match=r"splits\.json"):
            find_tasks(tmp_path)


def test_splits_by_the_hash_of_the_id(tmp_path):
    for number in range(24):
        write_task(tmp_path / f"t{number}")

    source, _ = task_source(tmp_path, heldout=0.5)

    tests = source.num_tasks("test")
    assert 4 < tests < 20
    assert source.num_tasks("train") == 24 - tests
    assert source.at(0, "test").id == task_source(tmp_path, heldout=0.5)[0].at(0, "test").id


def test_problems_are_collected_per_task(tmp_path):
    write_task(tmp_path / "good")
    write_task(tmp_path / "bad", {"instruction.md": None})
    write_task(tmp_path / "worse", more="[agent]\nspeed = 1\n")
    write_files(tmp_path, {"half/instruction.md": "x"})
    write_task(tmp_path / "twin", {"task.toml": '[task]\nname = "tests/good"\n'})

    with pytest.raises(DataError, match=r"4 of 5 tasks of .* cannot be used") as caught:
        task_source(tmp_path)

    text = "\n".join(caught.value.hints)
    for reason in (
        "bad has one problem: instruction.md: the file is missing",
        "worse has one problem: task.toml: agent.speed",
        "half is not a task: it has no task.toml",
        "twin has the name of",
        "skip_broken=true",
    ):
        assert reason in text
    source, tasks = task_source(tmp_path, skip_broken=True)
    assert list(tasks) == ["tests/good"]
    assert sum(note.startswith("left out: the task") for note in source.notes) == 3


def test_places_without_tasks(tmp_path):
    with pytest.raises(DataError, match="there is no task at"):
        find_tasks(tmp_path / "missing")
    with pytest.raises(DataError, match="has no task"):
        find_tasks(tmp_path)
    (tmp_path / "file").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        find_tasks(tmp_path / "file")
    (tmp_path / "file").unlink()
    write_task(tmp_path / "bad", {"instruction.md": None})
    with pytest.raises(NothingToDoError):
        task_source(tmp_path, skip_broken=True)


def test_registry_with_local_and_git_tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "repository"
    write_task(repository / "tasks" / "first")
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "tasks"], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    first = {"name": "first", "git_url": str(repository), "git_commit_id": commit}
    write_task(tmp_path / "near")
    sets = [
        {"name": "old", "version": "1", "tasks": [{"name": "near", "path": "near"}]},
        {"name": "new", "version": "2", "tasks": [{**first, "path": "tasks/first"}]},
    ]
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps(sets))

    assert list(task_source(registry, dataset="new@2")[1]) == ["tests/first"]
    assert [task.id for task in find_tasks(tmp_path, dataset="old").tasks] == ["tests/near"]
    with pytest.raises(DataError, match="has 2 data sets; name one") as caught:
        find_tasks(registry)
    assert "old@1, new@2" in caught.value.hints[0]
    with pytest.raises(DataError, match="no data set 'nwe'"):
        find_tasks(registry, dataset="nwe")
    for wrong, reason in (
        ({**first, "path": "../.."}, "leads out of its repository"),
        ({**first, "git_url": "ext::sh -c id", "path": "x"}, "cannot be fetched"),
        ({**first, "git_commit_id": "0" * 40, "path": "x"}, "cannot be fetched: "),
    ):
        registry.write_text(json.dumps([{"name": "new", "tasks": [wrong]}]))
        with pytest.raises(DataError, match=reason):
            find_tasks(registry)


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """Return a function that runs git in the repository `lab/sums`, which is on this machine."""
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{tmp_path}/remote/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "remote" / "lab" / "sums"
    write_task(repository / "tasks" / "first")

    def git(*words):
        base = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run([*base, *words], check=True, capture_output=True, text=True).stdout

    git("init", "-q", "-b", "main")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    git("add", ".")
    git("commit", "-qm", "tasks")
    git("tag", "-a", "v1", "-m", "the first")
    return git


def test_a_repository_is_downloaded_once_by_tag_branch_and_commit(remote, tmp_path):
    assert list(task_source("lab/sums@v1")[1]) == ["tests/first"]
    write_task(tmp_path / "remote" / "lab" / "sums" / "tasks" / "second")
    remote("add", ".")
    remote("commit", "-qm", "more")
    commit = remote("rev-parse", "HEAD").strip()
    both = ["tests/first", "tests/second"]
    assert [task.id for task in find_tasks("lab/sums").tasks] == both
    assert [task.id for task in find_tasks(f"lab/sums@{commit}").tasks] == both
    assert [task.id for task in find_tasks(f"file://{tmp_path}/remote/lab/sums@v1").tasks] == [
        "tests/first"
    ]
    # From now on nothing is asked for: neither the repository nor the network is needed.
    (tmp_path / "remote").rename(tmp_path / "gone")
    assert len(find_tasks("lab/sums@v1").tasks) == 1
    assert len(find_tasks("lab/sums").tasks) == 2


def test_a_repository_that_cannot_be_had_is_named(remote, tmp_path):
    with pytest.raises(DataError, match="has no tag and no branch 'v9'"):
        find_tasks("lab/sums@v9")
    with pytest.raises(DataError, match=r"the data set .*lab/other cannot be fetched: ") as caught:
        find_tasks("lab/other@v1")
    assert "clone it yourself" in caught.value.hints[-1]
    with pytest.raises(DataError, match=r"commit 0+ of .* cannot be fetched"):
        find_tasks(f"lab/sums@{'0' * 40}")
    with pytest.raises(DataError, match="there is no task at"):
        find_tasks("a/b/c")
    assert not list((tmp_path / "cache" / "harbor").glob("*.partial"))
