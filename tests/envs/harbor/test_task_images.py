"""Images of task folders are built before the first episode, and what fails is named there."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_gym.cli.app import app
from areal_gym.envs.harbor.harbor_env import HarborEnv
from areal_gym.errors import SandboxError
from tests._support.harbor_play import backend
from tests._support.harbor_tasks import write_files, write_task

BROKEN = {"environment/Dockerfile": "FROM python:3\nRUN echo no such thing; exit 7\n"}


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Return the arguments of HarborEnv for local places with a cache of their own."""
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    return backend("local")


def made_ready(path, **options):
    """Return the environment and what was said of the progress, after `before_run`."""
    env = HarborEnv(str(path), heldout=0, **options)
    seen = []

    async def run():
        await env.before_run(lambda done, total: seen.append((done, total)))

    asyncio.run(run())
    return env, seen


def test_images_are_built_before_the_run_and_shared_by_content(local, tmp_path):
    for name in ("one", "two", "three"):
        write_task(tmp_path / "tasks" / name)
    _, seen = made_ready(tmp_path / "tasks", **local)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    records = list((tmp_path / "cache").glob("places/local-*/*.json"))
    assert len(records) == 2  # the root and one image: the three folders have the same content
    write_files(tmp_path / "tasks" / "two", {"environment/question.txt": "another\n"})
    made_ready(tmp_path / "tasks", **local)
    assert len(list((tmp_path / "cache").glob("places/local-*/*.json"))) == 3


def test_a_build_that_fails_names_task_and_phase_before_any_episode(local, tmp_path):
    write_task(tmp_path / "tasks" / "good")
    write_task(tmp_path / "tasks" / "bad", BROKEN)
    with pytest.raises(SandboxError, match=r"1 of 2 tasks .* tests/bad, image: .*exit code 7") as e:
        made_ready(tmp_path / "tasks", **local)
    assert "line 2, RUN" in e.value.message
    assert "env.kwargs.skip_broken=true" in e.value.hints[-1]
    words = ["train", "--env", f"harbor:{tmp_path / 'tasks'}", "steps=1"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert isinstance(done.exception, SandboxError)
    assert "tests/bad, image: " in done.exception.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_tasks_without_an_image_can_be_left_out(local, tmp_path):
    write_task(tmp_path / "tasks" / "good")
    write_task(tmp_path / "tasks" / "bad", BROKEN)
    made_ready(tmp_path / "tasks", skip_broken=True, **local)
    later = HarborEnv(str(tmp_path / "tasks"), heldout=0, skip_broken=True, **local)
    assert later.num_tasks("train") == 1
    assert any("left out: tests/bad, image: " in note for note in later.tasks.notes)


def test_a_build_that_hangs_ends_at_its_own_limit_with_its_processes(local, tmp_path):
    slow = {"environment/Dockerfile": "FROM python:3\nRUN sleep 61.25\n"}
    task = write_task(tmp_path / "stuck", slow)
    settings = task / "task.toml"
    limited = settings.read_text().replace(
        "[environment]\n", "[environment]\nbuild_timeout_sec = 1.0\n"
    )
    settings.write_text(limited)
    with pytest.raises(SandboxError, match=r"tests/stuck, image: .*1 s"):
        made_ready(tmp_path / "stuck", **local)
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"61.25" in command for command in commands)
