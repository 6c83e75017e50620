"""All commands alike: the page about them, JSON, what goes to stdout, exit codes."""

import json
import re
import sys
from pathlib import Path

import click
import pytest
from viewed_runs import make_run

import areal_gym.errors
from areal_gym.cli.app import COMMANDS, run
from areal_gym.cli.output import EXIT_CODES
from areal_gym.cli.reference import _VARIABLES, JSON_KEYS, commands_page, every_command

ROOT = Path(__file__).parents[2]
ESCAPE = re.compile(r"\x1b")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with runs in it."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("first", "second"):
        make_run(folder / "runs" / name, num_steps=2, num_trajectories=4)
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


def test_the_page_of_commands_is_the_commands():
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == commands_page(), "python -m areal_gym.cli.reference > docs/cli.md"


def test_everything_says_what_it_is_for():
    for name, command in every_command():
        assert command.help, name
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.help, f"{name} {parameter.opts[0]}"


def test_readme_names_every_command():
    table = (ROOT / "README.md").read_text().partition("\n## Commands")[2].partition("\n## ")[0]
    for section in COMMANDS.values():
        for name in section:
            assert re.search(rf"\| `areal-gym {name}\b", table), name


def test_every_variable_that_is_read_is_on_the_page():
    source = "\n".join(file.read_text() for file in (ROOT / "areal_gym").rglob("*.py"))
    read = set(re.findall(r'"(AREAL_GYM_[A-Z_]+)"', source))
    told_to_programs = {"AREAL_GYM_PROMPT"}
    assert read - told_to_programs == {name for name in _VARIABLES if name.startswith("AREAL")}


# ---- JSON ---------------------------------------------------------------------------------------

ELSEWHERE = ("eval", "replay RUN", "bench")  # which play and train: in tests of their own
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
def test_json_is_all_that_stdout_has(call, name):
    code, out, _ = call(*command_line(name), "--json")
    assert code in (0, 1)
    found = json.loads(out)
    shape, keys = JSON_KEYS[name]
    if shape.startswith("object:"):
        (found,) = found.values()
    assert isinstance(found, dict if shape == "object" else list)
    for row in [found] if shape == "object" else found:
        assert set(keys.split()) <= set(row)


def test_every_command_that_reads_is_in_the_table():
    reading = {name for name, command in every_command() if "--json" in options_of(command)}
    in_table = {" ".join(name.split()[:2]) for name in JSON_KEYS}
    assert reading == {name if name in reading else name.split()[0] for name in in_table}


def options_of(command):
    return [flag for parameter in command.params for flag in parameter.opts]


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in JSON_KEYS if name not in ELSEWHERE])
def test_data_is_on_stdout_and_plain(call, name):
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
def test_a_mistake_leaves_stdout_to_the_data(call, argv):
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
        (["show", "runs"], 2, "runs holds no run"),
        (["show", "runs/frist"], 2, "there is no run runs/frist\n  did you mean 'runs/first'?"),
        (["report", "runs/first", "--out", "runs"], 2, "cannot use runs: Is a directory"),
        (["eval", "--env", "tir", "--fail-under", "pas@1=1"], 2, "did you mean 'pass@1'"),
        (["-p", "nothing", "list", "envs"], 0, "plugin nothing (not installed) failed"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_what_a_new_user_would_mistype(call, argv, code, says):
    found, _, err = call(*argv)
    assert found == code
    assert says in err


@pytest.mark.parametrize("argv", [[], ["data"]], ids=str)
def test_a_group_alone_shows_its_help(call, argv):
    code, out, err = call(*argv)
    assert code == 2
    assert out == ""
    assert err.startswith("Usage: ") or err.startswith("usage: ")


@pytest.mark.parametrize("variable", [True, False])
def test_no_color_on_a_terminal(call, monkeypatch, variable):
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
    readme = (ROOT / "README.md").read_text().partition("\nExit codes:")[2].partition("\n\n")[0]
    said = {int(code) for code in re.findall(r"\b(\d+) [a-z]", readme)}
    assert said == set(EXIT_CODES) - {70}  # a bug of ours is no part of the interface


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["list"], 0),
        (["check", "broken"], 2),
        (["list", "runs", "--root", "empty"], 5),
        (["compare", "runs/first", "runs/third"], 5),
    ],
)
def test_exit_codes(call, argv, code):
    assert call(*argv)[0] == code
