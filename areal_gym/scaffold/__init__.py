"""Templates of plugin packages with passing tests: `areal-gym new`.

    areal-gym-dice/
      pyproject.toml                      the entry point that areal-gym looks for
      README.md
      areal_gym_dice/__init__.py
      areal_gym_dice/plugin.py            the hooks
      areal_gym_dice/env.py               the environment
      tests/test_areal_gym_dice.py

The files are in `templates/`, with `$names` in them; each kind has its own.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import NamedTuple

from areal_gym.errors import UsageError, choices
from areal_gym.plugins import KINDS as SPECS
from areal_gym.plugins import Spec

__all__ = ["KINDS", "Kind", "Package", "plan", "plan_task"]

_TEMPLATES = Path(__file__).parent / "templates"


class Kind(NamedTuple):
    """A kind of plugin with a template."""

    listed: str  # its word in `areal-gym list`
    summary: str  # of the template's example
    use: str  # the arguments of `areal-gym` that use it in a run
    requires: str = "areal-gym"  # the dependency of the package

    @property
    def spec(self) -> type[Spec]:
        """The class of its specs."""
        return SPECS[self.listed]


KINDS: Mapping[str, Kind] = {
    "env": Kind("envs", "count a letter in a word, with a tool that spells", "train --env $name"),
    "agent": Kind(
        *("agents", "plain dialogue, and a second look before the first answer"),
        "train --env tir --agent $name",
    ),
    "engine": Kind(
        *("engines", "transformers in this process, a token at a time"),
        *("train --env tir --engine $name", "areal-gym[train]"),
    ),
    "loss": Kind(
        *("losses", "the policy gradient with truncated importance weights"),
        *("train --env tir trainer.loss=$name", "areal-gym[train]"),
    ),
    "advantage": Kind(
        *("advantages", "reward - group median"),
        *("train --env tir trainer.advantage=$name", "areal-gym[train]"),
    ),
    "reward": Kind(
        *("rewards", "the answer at the end, and a bonus for a single line"),
        "train --data prompts.jsonl --reward $name",
    ),
    "sandbox": Kind(
        *("sandboxes", "Python processes with some names defined from the start"),
        "train --env tir env.kwargs.sandbox=$name",
    ),
    "logger": Kind(
        *("loggers", "a CSV file with a row per number"), 'train --env tir "loggers=[$name]"'
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package, not yet written to disk."""

    directory: Path
    files: Mapping[str, str]  # contents by path inside the directory
    use: str  # the command that uses it in a run

    def write(self) -> None:
        """Write all files; raises UsageError if the directory exists."""
        try:
            self.directory.mkdir(parents=True)
        except FileExistsError:
            raise UsageError(
                f"{self.directory} exists already", hints=["choose another directory: --path DIR"]
            ) from None
        for path, text in self.files.items():
            file = self.directory / path
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
            if file.suffix == ".sh":
                file.chmod(0o755)


_TASK_FILES = {
    "task.toml": "task.toml",
    "instruction.md": "instruction.md",
    "README.md": "README.md",
    "environment/Dockerfile": "Dockerfile",
    "environment/words.py": "words.py",
    "solution/solve.sh": "solve.sh",
    "tests/test.sh": "test.sh",
    "tests/grade.py": "grade.py",
    "cheat/solve.sh": "cheat.sh",
}


def plan_task(name: str, parent: Path) -> Package:
    """Plan the task folder NAME in `parent`, in Harbor's format, or raise UsageError."""
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._-]*", name) or ".." in name:
        raise UsageError(
            f"{name!r} is not a valid name of a task",
            hints=["letters, digits, dots, dashes and underscores: fix-median"],
        )
    files = {
        path: Template((_TEMPLATES / f"harbor_{template}.tmpl").read_text("utf-8")).substitute(
            name=name
        )
        for path, template in _TASK_FILES.items()
    }
    return Package(
        directory=parent / name,
        files=files,
        use=f"areal-gym train --env harbor:{parent / name}",
    )


def plan(kind: str, name: str, parent: Path) -> Package:
    """Plan the package `areal-gym-NAME` in `parent`, with one plugin NAME, or raise UsageError."""
    if kind not in KINDS:
        raise UsageError(f"no template for {kind!r}", hints=choices(kind, KINDS))
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(name):
        better = "-".join(re.findall(r"[a-z0-9]+", name.lower())).lstrip("0123456789-")
        raise UsageError(
            f"{name!r} is not a valid package name",
            hints=[
                *([f"did you mean {better!r}?"] if better not in ("", name) else []),
                "lower-case letters and digits, with single dashes between words: letter-count",
            ],
        )
    known = KINDS[kind]
    is_function = kind in ("loss", "advantage", "reward")
    snake, camel = name.replace("-", "_"), "".join(map(str.capitalize, name.split("-")))
    names = {
        "name": name,
        "distribution": f"areal-gym-{name}",
        "package": f"areal_gym_{snake}",
        "object": snake if is_function else f"{camel}{kind.capitalize()}",
        "kind": kind,
        "spec": known.spec.__name__,
        "hook": known.spec.hook,
        **known._asdict(),
    }
    names["use"] = "areal-gym " + Template(known.use).substitute(names)
    package = names["package"]
    templates = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{package}/__init__.py": "init.py",
        f"{package}/plugin.py": "plugin.py",
        f"{package}/{kind}.py": f"{kind}.py",
        f"tests/test_{package}.py": f"test_{kind}.py",
    }

    def render(template: str) -> str:
        text = (_TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
        return Template(text).substitute(names)

    return Package(
        directory=parent / names["distribution"],
        files={path: render(template) for path, template in templates.items()},
        use=names["use"],
    )
