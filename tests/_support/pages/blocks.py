"""Finds the code of README and docs; checks names in what is not run."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

import click
from pydantic import BaseModel

from areal_gym.cli.app import app
from areal_gym.cli.options import Options
from areal_gym.config import RunConfig
from tests._support.paths import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])

_PROGRAM = r"(?:areal-gym|make|pip install|ray|python -m) |python (?:benchmarks|examples)/"
_BLOCK = re.compile(
    r"^```(\w*)\n(.*?)^```$|(?:\A|(?<=\n\n))()((?:    [^\n]*\n|\n(?=    ))+)", re.S | re.M
)
_INLINE = re.compile(rf"(?<!`)`((?:{_PROGRAM})[^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced or indented piece of code; the text above it is `lead`."""

    page: Path
    line: int
    language: str
    text: str
    lead: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}: {self.text.strip().splitlines()[0].strip()}"

    @property
    def commands(self) -> list[str]:
        """Commands without comments; a backslash joins lines, `&&` separates commands."""
        lines = self.text.replace("\\\n", " ").splitlines()
        parts = [part.strip() for line in lines for part in line.split(" && ") if part.strip()]
        return [re.sub(r"\s+# .*", "", part) for part in parts]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    blocks = []
    for match in _BLOCK.finditer(text):
        code = match[2] or match[4]
        language = match[1] or ""
        if re.match(rf"\s*(?:{_PROGRAM}|(?:source|cd|for) )", code):
            language = "shell"
        line = text.count("\n", 0, match.start()) + 1
        lead = text[: match.start()].rstrip().rpartition("\n")[2]
        blocks.append(Block(page, line, language, code, lead))
    return blocks


def inline_commands(page: Path) -> list[str]:
    """Return the commands within sentences."""
    return [" ".join(text.split()) for text in _INLINE.findall(_BLOCK.sub("", page.read_text()))]


def check_names(command: str) -> None:
    """Assert that a command's options, settings, targets, files and extras exist.

    Raises:
        AssertionError: one of them does not.
    """
    match shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", command)):
        case ["areal-gym", *words]:
            _check_command(words)
        case ["make", *targets]:
            done = subprocess.run(["make", "--dry-run", "-C", ROOT, *targets], capture_output=True)
            assert done.returncode == 0, done.stderr
        case [program, "install", *requirements] if Path(program).name == "pip":
            named = re.findall(r"(?:areal-gym|\.)\[([\w,-]+)\]", " ".join(requirements))
            assert {*",".join(named).split(",")} <= {*_project()["optional-dependencies"], ""}
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module), module
        case ["python", script, *options]:
            source = (ROOT / script).read_text()
            assert all(option in source for option in options if option.startswith("--"))
        case [program, *_]:
            assert program in ("ray", "source"), f"no rule for {command}"


def _check_command(words: list[str]) -> None:
    command: click.Command = app
    context = app.make_context("areal-gym", [], resilient_parsing=True, obj=Options())
    options = {name for parameter in app.get_params(context) for name in parameter.opts}
    for word in words:
        option, key = word.partition("=")[0], re.match(r"([a-z_]+(?:\.[a-z_]+)+)=", word)
        if word.startswith("-"):
            assert option in options, f"{command.name} has no option {option}"
        elif isinstance(command, click.Group) and word.islower():
            found = command.get_command(context, word)
            assert found is not None or "no:" in words[0] or "-p" in words, f"no command {word}"
            command = found or click.Command(word)
            options |= {
                name
                for parameter in command.get_params(context)
                for name in (*parameter.opts, *parameter.secondary_opts)
            }
        elif key and command.name == "train":
            assert is_setting(key[1]), f"no setting {key[1]}"


def is_setting(path: str) -> bool:
    """Tell whether `trainer.kl.coefficient` and the like is a setting, or lies below `kwargs`."""
    model: type[BaseModel] | None = RunConfig
    for name in path.split("."):
        if name == "kwargs" or name.endswith("_kwargs"):
            return True
        if model is None or name not in model.model_fields:
            return False
        kind = model.model_fields[name].annotation
        kinds = (kind, *get_args(kind))
        models = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        model = models[0] if models else None
    return True


@cache
def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
