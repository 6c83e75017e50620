"""All commands alike: the page about them, JSON, what goes to stdout, exit codes."""

import io
import json
import re
import sys

import click
import pytest

import areal_gym.errors
from areal_gym.cli.app import COMMANDS, run
from areal_gym.cli.command_reference import _VARIABLES, JSON_KEYS, commands_page, every_command
from areal_gym.cli.output import EXIT_CODES, print_columns
from tests._support.evaluation_dirs import write_evaluation
from tests._support.paths import ROOT
from tests._support.run_dirs import make_run

ESCAPE = re.compile(r"\x1b")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with runs in it."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("first", "second"):
        make_run(folder / "runs" / name, num_steps=2, num_trajectories=4)
    write_evaluation(folder / "runs" / "measured", [(0, 0), (1, 0)])
    return folder


@pytest.fixture
def call(home, monkeypatch, capsys):
    """Run the program there: (exit code, stdout, stderr)."""
    monkeypatch.chdir(home)

    def program(*argv):
        code = run(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return program


# ---- the page -----------------------------------------------------------------------------------


def test_cli_page_is_up_to_date():
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == commands_page(), "python -m areal_gym.cli.command_reference > docs/cli.md"


def test_every_command_and_option_has_help():
    for name, command in every_command():
        assert command.help, name
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.help, f"{name} {parameter.opts[0]}"


def test_table_of_commands_names_every_command():
    table = commands_page().partition("\n| command |")[2].partition("\n## ")[0]
    for section in COMMANDS.values():
        for name in section:
            assert re.search(rf"\| \[`areal-gym {name}\b.*\| [A-Z].* \|", table), name


def test_environment_variables_are_documented():
    source = "\n".join(file.read_text() for file in (ROOT / "areal_gym").rglob("*.py"))
    read = set(re.findall(r'"(AREAL_GYM_[A-Z_]+)"', source))
    told_to_programs = {"AREAL_GYM_PROMPT", "AREAL_GYM_ROLES"}
    assert read - told_to_programs == {name for name in _VARIABLES if name.startswith("AREAL")}


# ---- JSON ---------------------------------------------------------------------------------------

ELSEWHERE = ("eval", "replay RUN", "plan", "bench")  # they play and train: tests of their own
FILLED_IN = {
    "ID": ["tir"],
    "RUN": ["runs/first"],
    "FILE": ["page.html"],
    "ENV": ["countdown", "-n", "2"],
}
MORE = {
    "check ENV": ["--concurrent", "2"],
    "compare RUN RUN": [],
    "data check ENV": [],
}


def command_line(name):
    words = [word for part in name.split() for word in FILLED_IN.get(part, [part])]
    if name == "data check ENV":
        words = ["data", "check", "countdown"]
    return [*words, *MORE.get(name, [])]


@pytest.mark.parametrize("name", [name for name in JSON_KEYS if name not in ELSEWHERE])
def test_stdout_with_json_is_one_json_value(call, name):
    code, out, _ = call(*command_line(name), "--json")
    assert code in (0, 1)
    found = json.loads(out)
    shape, keys = JSON_KEYS[name]
    if shape.startswith("object:"):
        (found,) = found.values()
    assert isinstance(found, dict if shape == "object" else list)
    for row in [found] if shape == "object" else found:
        assert set(keys.split()) <= set(row)


def test_every_reading_command_is_tested():
    reading = {name for name, command in every_command() if "--json" in options_of(command)}
    in_table = {" ".join(name.split()[:2]) for name in JSON_KEYS}
    assert reading == {name if name in reading else name.split()[0] for name in in_table}


def options_of(command):
    return [flag for parameter in command.params for flag in parameter.opts]


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in JSON_KEYS if name not in ELSEWHERE])
def test_data_goes_to_stdout_without_style(call, name):
    code, out, err = call(*command_line(name))
    assert code in (0, 1)
    assert out.strip() or name == "data check ENV"  # where nothing is wrong, there are no rows
    assert not ESCAPE.search(out + err)


@pytest.mark.parametrize(
    "argv",
    [
        ["list", "nothing"],
        ["show", "nothing"],
        ["view", "nothing"],
        ["compare", "nothing", "x"],
        ["report", "nothing"],
        ["bench", "nothing"],
        ["data", "show", "nothing"],
        ["data", "check", "nothing"],
        ["check", "nothing"],
        ["eval", "--run", "nothing"],
        ["replay", "nothing"],
        ["list", "runs", "--root", "nothing"],
    ],
    ids=" ".join,
)
def test_errors_go_to_stderr(call, argv):
    for flags in ([], ["--json"]):
        code, out, err = call(*argv, *flags)
        assert code in (2, 5)
        assert out == ""
        assert err.startswith("areal-gym: error: ")
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["list", "rusn"], 2, "did you mean 'runs'?"),
        (["data", "sow"], 2, "no command 'sow'\n  did you mean 'show'?"),
        (["list", "--hepl"], 2, "did you mean '--help' or"),
        (["show", "runs"], 2, "runs is not a run directory"),
        (["show", "runs/frist"], 2, "there is no run runs/frist\n  did you mean 'runs/first'?"),
        (["eval", "--run", "runs/frist"], 2, "did you mean 'runs/first'?"),
        (["view", "runs/frist"], 2, "did you mean 'runs/first'?"),
        (["replay", "run/first"], 2, "did you mean 'runs'?"),
        (["check", "remote:http://HOST:PORT"], 2, "is not the address of an environment"),
        (["train", "--env", "tir", "lr=1"], 2, "did you mean 'trainer.lr'"),
        (["train", "--env", "tir", "trainer.group_size=1"], 2, "did you mean 'rollout.group_size'"),
        (["train", "--env", "tir", "env.kwargs.levl=1"], 2, "did you mean 'level'?"),
        (["train", "--env", "tir", "engine.model=org/name"], 2, "hf download org/name"),
        (["report", "runs/first", "--out", "runs"], 2, "cannot use runs: Is a directory"),
        (["eval", "--env", "tir", "--fail-under", "pas@1=1"], 2, "did you mean 'pass@1'"),
        (["-p", "nothing", "list", "envs"], 0, "plugin nothing (not installed) failed"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_common_typos_get_suggestions(call, argv, code, says):
    found, _, err = call(*argv)
    assert found == code
    assert says in err


def test_narrow_terminal_folds_table_cells(capsys, monkeypatch):
    rows = [
        ("tir", "arithmetic with a Python sandbox", "areal-gym 0.1.0"),
        ("  in", "an id-of-it", ""),
    ]
    print_columns(rows)
    assert capsys.readouterr().out.splitlines()[0] == "  ".join(rows[0]).replace("tir", "tir ")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "36")
    print_columns(rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 36
    assert lines[0].split() == ["tir", "arithmetic", "areal-gym"]
    assert "id-of-it" in lines[-1]


def test_show_prints_how_to_set_arguments(call):
    assert "arguments, set by env.kwargs.NAME=VALUE:" in call("show", "tir")[1]
    out = call("show", "sglang")[1]
    assert "engine.kwargs.NAME=VALUE" in out
    assert re.search(r"^  policy +Path +from the run$", out, re.M)
    assert re.search(r"^  gpus .* default \[\]$", out, re.M)


HOSTILE = """
from areal_gym import Response, Task, TextEnv
from areal_gym.plugins import EnvSpec, hookimpl


class Hostile(TextEnv):
    \"""Writes to the terminal.\"""

    def sample_task(self, rng, options):
        return Task(id="x", data={"a": "\\x1b[31m"})

    def first_messages(self, task):
        return [{"role": "user", "content": "\\x1b[2J \\u202e"}]

    async def respond(self, message):
        return Response(is_terminated=True)


@hookimpl
def register_envs():
    yield EnvSpec(id="hostile", entry_point="hostile_plugin:Hostile", summary="hostile")
"""


def test_control_characters_of_tasks_are_escaped(call, tmp_path, monkeypatch):
    (tmp_path / "hostile_plugin.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/gold\n/quit\n"))
    for argv in (["play", "hostile"], ["show", "hostile"], ["data", "show", "hostile", "-n", "1"]):
        code, out, err = call("-p", "hostile_plugin", *argv)
        assert code == 0, err
        assert not re.search("[\x1b\u202e]", out)
        assert "[U+001B][2J [U+202E]" in out
        assert argv[0] != "play" or "has no gold actions" in err
    code, _, err = call("-p", "hostile_plugin", "bench", "env", "--env", "hostile")
    assert code == 2
    assert "'hostile' has no gold_action()" in err


def test_damaged_run_does_not_hide_other_runs(call, tmp_path):
    for name in ("good", "bad"):
        make_run(tmp_path / name, num_steps=1, num_trajectories=1)
    (tmp_path / "bad" / "metrics.jsonl").write_text("no JSON\n{}\n")
    code, out, err = call("list", "runs", "--root", str(tmp_path), "--json")
    assert code == 0
    assert [row["path"] for row in json.loads(out)] == [str(tmp_path / "good")]
    assert "bad is skipped: " in err


@pytest.mark.parametrize("argv", [[], ["data"]], ids=str)
def test_command_group_without_command_prints_help(call, argv):
    code, out, err = call(*argv)
    assert code == 2
    assert out == ""
    assert err.startswith("Usage: ") or err.startswith("usage: ")


@pytest.mark.parametrize("variable", [True, False])
def test_no_color_is_respected_on_a_terminal(call, monkeypatch, variable):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if variable:
        monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = call("check", "countdown", "-n", "1", "--concurrent", "2")
    assert code == 0
    assert bool(ESCAPE.search(out)) is not variable


# ---- exit codes ---------------------------------------------------------------------------------


def test_every_exit_code_is_documented():
    errors = [
        error
        for error in vars(areal_gym.errors).values()
        if isinstance(error, type) and issubclass(error, areal_gym.errors.GymError)
    ]
    assert {error.exit_code for error in errors} <= set(EXIT_CODES)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["list"], 0),
        (["check", "broken"], 2),
        (["list", "runs", "--root", "empty"], 5),
        (["compare", "runs/first", "runs/third"], 2),
    ],
)
def test_exit_codes_of_errors(call, argv, code):
    assert call(*argv)[0] == code
