"""TAB: what is offered at each place, and the scripts that make shells ask."""

import os
import shutil
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete

from areal_gym.cli.app import COMMANDS, VARIABLE, app, run
from tests._support.run_dirs import make_run


def offered(line):
    """What is offered at the end of the line."""
    *words, incomplete = line.split(" ")[1:]
    complete = ShellComplete(app, {}, "areal-gym", VARIABLE)
    return [item.value for item in complete.get_completions(words, incomplete)]


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("areal-gym ", ["list", "train", "compare", "serve-env"], ["--plain"]),
        ("areal-gym se", ["serve", "serve-env"], ["list"]),
        ("areal-gym --p", ["--plain"], ["list"]),
        ("areal-gym data ", ["show", "check", "pull"], []),
        ("areal-gym data pull ", ["tau2", "aime24", "gsm8k"], ["tir"]),
        ("areal-gym list lo", ["losses", "loggers"], ["envs"]),
        ("areal-gym show grp", ["grpo"], ["tir"]),
        ("areal-gym show x --kind e", ["envs", "engines"], ["losses"]),
        ("areal-gym new a", ["agent", "advantage"], ["env"]),
        ("areal-gym bench e", ["env", "engine"], ["step"]),
        ("areal-gym train --env ", ["tir", "tau2/mock", "gymnasium:"], ["grpo"]),
        ("areal-gym train --agent ch", ["chat"], []),
        ("areal-gym train --engine em", ["embedded"], []),
        ("areal-gym train --objective d", ["dpo", "distill"], ["rl"]),
        ("areal-gym train trainer.l", ["trainer.lr=", "trainer.lora="], ["seed="]),
        ("areal-gym eval --env tir eval.", ["eval.num_tasks="], []),
        ("areal-gym train trainer.algorithm=d", ["trainer.algorithm=dapo"], []),
        ("areal-gym train trainer.algorithm = d", ["dapo", "dr_grpo"], ["grpo"]),
        ("areal-gym train trainer.algorithm ", ["dapo", "grpo"], ["trainer.lr="]),
        ("areal-gym train engine.id=e", ["engine.id=embedded"], []),
        ("areal-gym train dpo.kind=", ["dpo.kind=sigmoid"], []),
        ("areal-gym train deterministic=t", ["deterministic=true"], ["deterministic=false"]),
        ("areal-gym play tir le", ["level="], []),
        ("areal-gym check countdown num", ["num_numbers="], []),
        ("areal-gym completion ", ["bash", "zsh", "fish"], []),
    ],
)
def test_completion_candidates_by_position(line, some, none):
    found = offered(line)
    assert set(some) <= set(found)
    assert not set(none) & set(found)


@pytest.mark.parametrize(
    "line", ["areal-gym bnch ", "areal-gym play nothing le", "areal-gym data x y"]
)
def test_no_candidates_for_an_invalid_line(line, capsys, monkeypatch):
    monkeypatch.setenv(VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    run([])
    assert capsys.readouterr().err == ""


def test_run_directories_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/tir-1", "runs/tir-2", "old/math-1"):
        make_run(tmp_path / name, num_steps=1, num_trajectories=1)
    (tmp_path / "runs" / "empty").mkdir()
    assert offered("areal-gym view ") == ["runs/tir-1", "runs/tir-2"]
    assert offered("areal-gym compare runs/tir-1 runs/tir-2") == ["runs/tir-2"]
    assert offered("areal-gym report old/") == ["old/math-1"]
    assert offered("areal-gym eval --run ol") == ["ol"]  # the shell's own directories


def test_completing_command_names_imports_no_command():
    code = (
        "import sys\n"
        "from click.shell_completion import ShellComplete\n"
        "from areal_gym.cli.app import app, VARIABLE\n"
        "ShellComplete(app, {}, 'areal-gym', VARIABLE).get_completions([], 'tr')\n"
        "assert 'areal_gym.cli.train_command' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_program(shell, capsys, monkeypatch):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{VARIABLE}={shell}_complete" in script
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert run(["completion"]) == 0
    assert capsys.readouterr().out == script
    # After "=" comes a value and no space; fish does that by itself.
    num_places = {"bash": script.count("compopt -o nospace"), "zsh": script.count("{suffix[@]}")}
    assert num_places.get(shell) == {"bash": 1, "zsh": 2}.get(shell)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_unknown_shell_is_refused(capsys):
    assert run(["completion", "bsh"]) == 2
    assert "did you mean 'bash'" in capsys.readouterr().err


def test_completion_in_a_real_bash(tmp_path):
    if not shutil.which("bash"):
        pytest.skip("no bash")
    program = tmp_path / "areal-gym"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m areal_gym "$@"\n')
    program.chmod(0o755)
    asked = (
        'eval "$(areal-gym completion bash)"\n'
        "COMP_WORDS=(areal-gym train trainer.algor) COMP_CWORD=2\n"
        "_areal_gym_completion areal-gym 2>/dev/null\n"  # compopt wants a real TAB
        'echo "${COMPREPLY[@]}"\n'
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc"],
        input=asked,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": path},
    )
    assert done.stdout.split() == ["trainer.algorithm="]


def test_run_and_env_arguments_are_completed():
    """What a person would complete by hand has a completer: nobody adds a command without one."""
    context = app.make_context("areal-gym", [], resilient_parsing=True)
    wanted = {"env", "run", "runs", "overrides", "settings", "agent", "engine"}
    for name in (name for section in COMMANDS.values() for name in section):
        command = app.get_command(context, name)
        for parameter in command.params:
            if parameter.name in wanted:
                assert parameter._custom_shell_complete is not None, f"{name} {parameter.name}"
