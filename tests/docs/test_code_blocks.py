"""What README and docs tell people to type: Python runs, commands are taken by the program.

What only looks is run. A `train` is run as far as `--dry-run`; of other commands, and where names
of one's own are used, names and options are read. What stands for something of one's own is
replaced (`DIR`, `RUN`, `ENV`, ...).
"""

import ast
import asyncio
import json
import re
import shlex
from pathlib import Path

import click
import pytest
from viewed_runs import make_run

from areal_gym.cli.app import app, run
from areal_gym.cli.output import Options

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
INDENTED = re.compile(r"(?:\A|\n\n)((?:    [^\n]*\n|\n(?=    ))+)")
INLINE = re.compile(r"`(areal-gym [^`]+)`")


def python_of(page):
    return [code for language, code in FENCED.findall(page.read_text()) if language == "python"]


def shell_of(page):
    text = page.read_text()
    blocks = [
        code for language, code in FENCED.findall(text) if language in ("", "bash", "console")
    ]
    plain = FENCED.sub("", text)
    blocks += [block for block in INDENTED.findall(plain)]
    blocks += [command + "\n" for command in INLINE.findall(plain) if " | " not in command]
    return [
        line.strip()
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip().startswith("areal-gym ") and "..." not in line
    ]


ONES_OWN = (
    "my_run.yaml",
    "my_loss",
    "--env reverse",
    "letter-count",
    "--objective NAME",
    "--resume",
)
WITHOUT_PARTS = ("my_package", "runs/rm", "docker")
"""Blocks that need what the reader has: they are compiled."""
COMMANDS = sorted({line for page in PAGES for line in shell_of(page) if "-p my_plugin" not in line})
"""Those of the plugin in docs/plugins.md have a test of their own, where it exists."""


LOOKING = (
    "list",
    "show",
    "plugins",
    "doctor",
    "completion",
    "data show",
    "report",
    "compare",
    "new",
)
STAND_INS = {
    **{"ENV": "tir", "ID": "tir", "AGENT": "chat", "ENGINE": "embedded", "KIND": "env"},
    **{"NAME": "dice", "RUN": "runs/first"},
}
"""In a directory with one run, and a file of questions."""


@pytest.mark.parametrize("page", [p for p in PAGES if python_of(p)], ids=lambda p: p.name)
def test_python(page, tiny_policy, tmp_path, monkeypatch):
    """One namespace for a page: later blocks go on where earlier ones ended."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code in python_of(page):
        code = code.replace("path/to/policy", str(tiny_policy))
        compiled = compile(code, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if not any(part in code for part in WITHOUT_PARTS):
            awaited = eval(compiled, namespace)
            if awaited is not None:
                asyncio.run(awaited)


def test_notebook(tiny_policy, tmp_path, monkeypatch):
    """Cell by cell in a running loop, as in a kernel; what ends a cell can be shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", str(tiny_policy))
    monkeypatch.setenv("STEPS", "1")
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    namespace = {"__name__": "__main__"}

    async def kernel():
        for cell in cells:
            *body, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(body, []), "cell", "exec"), namespace)
            assert isinstance(last, ast.Expr)
            shown = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
            if not isinstance(shown, tuple):
                assert shown._repr_html_().startswith('<div class="areal-gym">')

    asyncio.run(kernel())


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where somebody types that has trained once, and has questions."""
    make_run(tmp_path / "runs" / "first")
    row = {"question": "How much is 1 + 1?", "answer": "2"}
    (tmp_path / "questions.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        command
        for command in COMMANDS
        if command.removeprefix("areal-gym ").startswith(LOOKING) and "[" not in command
    ],
)
def test_what_looks_is_run(command, place, capsys):
    words = shlex.split(command, comments=True)[1:]
    if words[0] == "show":
        words = ["tir" if word == "NAME" else word for word in words]
    status = run([STAND_INS.get(word, word) for word in words])
    # `doctor` may find something missing here.
    assert status == 0 or (words[0] == "doctor" and status == 1), capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tiny_policy, tmp_path, capsys, monkeypatch):
    words = [
        str(tmp_path / word) if word in ("RUN", "FILE") else word
        for word in shlex.split(command, comments=True)[1:]
    ]
    words = [re.sub(r"\bDIR\b", str(tiny_policy), word) for word in words]
    words = [
        word.replace("HOST:PORT", "127.0.0.1:1").replace("FIRST:", "127.0.0.1:") for word in words
    ]
    monkeypatch.chdir(ROOT)
    name = next((word for word in words if not word.startswith("-")), "")
    if name == "train" and not any(part in command for part in ONES_OWN):
        assert run([*words, "--dry-run"]) == 0, capsys.readouterr().err
        return
    while words and words[0] in ("--plain", "-v"):
        words.pop(0)
    if words[0] in ("--help", "--version"):
        return
    context = app.make_context("areal-gym", [], resilient_parsing=True, obj=Options())
    loaded = app.get_command(context, name)
    assert loaded is not None, f"no command {name!r}"
    if isinstance(loaded, click.Group):  # data show, data pull
        loaded, words = loaded.commands[words[1]], words[1:]
    known = [option for p in loaded.params for option in (*p.opts, *p.secondary_opts)]
    used = [word.partition("=")[0] for word in words[1:] if word.startswith("-")]
    assert set(used) <= {*known, "--help", "-h"}
