"""`--data`, `--reward`, `--tools`, `--env FILE.py:CLASS` and `-p FILE.py`."""

from __future__ import annotations

import io
import json

import pytest
import yaml

from areal_gym.cli.app import run

ENV = '''
from areal_gym import Response, Task, TextEnv
from areal_gym.plugins import EnvSpec, hookimpl


class Guess(TextEnv):
    """Say the number."""

    def __init__(self, top: int = 5, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.top = top

    def sample_task(self, rng, options):
        return Task(id="n", data={"n": int(rng.integers(self.top))})

    def first_messages(self, task):
        return [{"role": "user", "content": f"say {task.data['n']}"}]

    async def respond(self, message):
        is_right = message["content"] == str(self.task.data["n"])
        return Response(reward=float(is_right), is_terminated=True)

    def gold_action(self):
        return str(self.task.data["n"])


class Other:
    pass


def make_other():
    return Other()


@hookimpl
def register_envs():
    yield EnvSpec(id="guess", entry_point="my_env:Guess", summary="say the number")
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "my files"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "my_env.py").write_text(ENV)
    (folder / "broken.py").write_text("import areal_gym\n\nx = 1 / 0\n")
    rows = [{"prompt": f"What is {n}+1?", "answer": str(n + 1)} for n in range(13)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = "def exact(completion, answer):\n    return float(completion == answer)\n\n"
    code += 'def add(a: int, b: int) -> str:\n    """Add."""\n    return str(a + b)\n'
    (folder / "mine.py").write_text(code)
    return folder


def settings_of(capsys, *arguments):
    assert run(["train", "--dry-run", *arguments]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_the_options_are_settings_with_absolute_paths(folder, capsys):
    settings = settings_of(
        capsys,
        *("--data", "prompts.jsonl", "--reward", "mine.py:exact", "--reward", "format=0.1"),
        *("--tools", "mine.py:add", "--model", "Qwen/Qwen3-0.6B"),
    )
    assert settings["env"] == {
        "id": "prompts",
        "kwargs": {
            "tasks": str(folder / "prompts.jsonl"),
            "reward": [f"{folder}/mine.py:exact", "format=0.1"],
            "tools": f"{folder}/mine.py:add",
        },
        "fixed_roles": {},
    }
    assert settings["trainer"]["lr"] == 1e-6
    env = ("--env", "my_env.py:Guess", "env.kwargs.top=3")
    assert settings_of(capsys, *env)["env"]["id"] == f"{folder}/my_env.py:Guess"
    mixed = settings_of(capsys, "--env", "my_env.py:Guess:0.5", "--env", "tir:0.5")["env"]
    assert mixed["kwargs"]["envs"][0] == {"id": f"{folder}/my_env.py:Guess", "weight": 0.5}
    sft = settings_of(capsys, "--objective", "sft", "--data", "prompts.jsonl", "--env", "tir")
    assert sft["data"]["file"] == str(folder / "prompts.jsonl")


def test_own_prompts_and_classes_are_played(folder, capsys, monkeypatch):
    for arguments, lines in (
        (["--data", "prompts.jsonl", "--reward", "mine.py:exact", "--task", "3"], "4\n"),
        (["my_env.py:Guess", "top=2"], "/gold\n"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert run(["play", *arguments]) == 0
        assert "reward 1" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("/gold\n"))
    assert run(["-p", str(folder / "my_env.py"), "play", "guess"]) == 0
    assert "reward 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["play"], ["which ENV?", "--data FILE"]),
        (["play", "my_env.py"], ["no environment 'my_env.py'", "my_env.py:CLASS"]),
        (["play", "my_env.py:Gues"], ["no environment 'Gues'", "did you mean 'Guess'?"]),
        (["play", "my_env.py:Other"], ["my_env.py:Other is no environment", "TextEnv"]),
        (["play", "my_env.py:make_other"], ["makes a Other, which is no environment"]),
        (["play", "broken.py:X"], ["ZeroDivisionError", "broken.py, line 3"]),
        (["play", "my_evn.py:Guess"], ["my_evn.py", "did you mean"]),
        (["play", "--data", "promts.jsonl", "--reward", "exact"], ["did you mean"]),
        (["train", "--data", "prompts.jsonl", "--reward", "exact"], ["which model", "--model"]),
        (["train"], ["which environment", "--data prompts.jsonl"]),
        (
            ["train", "--env", "tir", "--env", "math", "--data", "prompts.jsonl"],
            ["for one environment, not for a mix"],
        ),
        (
            ["train", "--objective", "sft", "--data", "a.jsonl", "--reward", "exact"],
            ["sft has no use for --reward"],
        ),
    ],
)
def test_mistakes_are_named(folder, capsys, arguments, words):
    assert run(arguments) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said


def test_code_of_another_persons_run_needs_consent(folder, tmp_path, capsys):
    copied = tmp_path / "copied"
    copied.mkdir()
    env = {"id": f"{folder}/my_env.py:Guess", "kwargs": {}}
    (copied / "config.yaml").write_text(yaml.safe_dump({"env": env}))
    assert run(["train", "--resume", "--out", str(copied), "--dry-run"]) == 2
    assert "env.id" in capsys.readouterr().err
    assert run(["train", "--resume", "--out", str(copied), "--dry-run", "--trust"]) == 0
