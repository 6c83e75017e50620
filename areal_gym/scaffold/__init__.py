"""New packages that offer something to areal-gym, with tests that pass: `areal-gym new`.

    areal-gym-dice/
      pyproject.toml                      the entry point that areal-gym looks for
      README.md
      areal_gym_dice/__init__.py
      areal_gym_dice/plugin.py            what is offered
      areal_gym_dice/env.py               the thing itself
      tests/test_areal_gym_dice.py

The texts are in `templates/`, with `$names` in them: those of a kind have its name.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import NamedTuple

from areal_gym.errors import UsageError, did_you_mean

__all__ = ["KINDS", "Kind", "Package", "plan"]

_TEMPLATES = Path(__file__).parent / "templates"


class Kind(NamedTuple):
    """Something that can be made."""

    listed: str
    """What `areal-gym list` calls many of it."""
    spec: str
    hook: str
    summary: str
    """Of the example that the template makes."""
    requires: str
    """What the package depends on."""
    use: str
    """How to use it in a run."""


KINDS: Mapping[str, Kind] = {
    "env": Kind(
        "envs",
        "EnvSpec",
        "register_envs",
        "count a letter in a word, with a tool that spells",
        "areal-gym",
        "areal-gym train --env $name",
    ),
    "agent": Kind(
        "agents",
        "AgentSpec",
        "register_agents",
        "plain dialogue, and a second look before the first answer",
        "areal-gym",
        "areal-gym train --env tir --agent $name",
    ),
    "loss": Kind(
        "losses",
        "PolicyLossSpec",
        "register_policy_losses",
        "the policy gradient with truncated importance weights",
        "areal-gym[train]",
        "areal-gym train --env tir trainer.loss=$name",
    ),
    "advantage": Kind(
        "advantages",
        "AdvantageSpec",
        "register_advantage_estimators",
        "reward - group median",
        "areal-gym[train]",
        "areal-gym train --env tir trainer.advantage=$name",
    ),
    "sandbox": Kind(
        "sandboxes",
        "SandboxSpec",
        "register_sandboxes",
        "walled-in Python processes that know some names already",
        "areal-gym",
        "areal-gym train --env tir env.kwargs.sandbox=$name",
    ),
    "logger": Kind(
        "loggers",
        "LoggerSpec",
        "register_loggers",
        "a CSV file with a row per number",
        "areal-gym",
        'areal-gym train --env tir "loggers=[$name]"',
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package that is not written yet."""

    directory: Path
    files: Mapping[str, str]
    """Texts by path inside the directory."""
    use: str
    """What to type to use what it offers."""

    def write(self) -> None:
        """Write all files.

        Raises:
            UsageError: the directory exists.
        """
        try:
            self.directory.mkdir(parents=True)
        except FileExistsError:
            raise UsageError(
                f"{self.directory} exists already", hints=["another place: --path DIR"]
            ) from None
        for path, text in self.files.items():
            file = self.directory / path
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")


def plan(kind: str, name: str, parent: Path) -> Package:
    """The package `areal-gym-NAME` in `parent`, which offers one thing with the id NAME.

    Raises:
        UsageError: there is no such kind, or the name is none for a package.
    """
    if kind not in KINDS:
        near = did_you_mean(kind, KINDS)
        hints = [*([near] if near else []), f"there is: {', '.join(KINDS)}"]
        raise UsageError(f"no template for {kind!r}", hints=hints)
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(name):
        better = "-".join(re.findall(r"[a-z0-9]+", name.lower())).lstrip("0123456789-")
        raise UsageError(
            f"{name!r} is no name for a package",
            hints=[
                *([f"did you mean {better!r}?"] if better not in ("", name) else []),
                "lower-case letters and digits, with single dashes between words: letter-count",
            ],
        )
    known = KINDS[kind]
    is_function = kind in ("loss", "advantage")
    snake, camel = name.replace("-", "_"), "".join(map(str.capitalize, name.split("-")))
    names = {
        "name": name,
        "distribution": f"areal-gym-{name}",
        "package": f"areal_gym_{snake}",
        "object": snake if is_function else f"{camel}{kind.capitalize()}",
        "kind": kind,
        **known._asdict(),
    }
    names["use"] = Template(known.use).substitute(names)
    package = names["package"]
    files = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{package}/__init__.py": "init.py",
        f"{package}/plugin.py": "plugin.py",
        f"{package}/{kind}.py": f"{kind}.py",
        f"tests/test_{package}.py": f"test_{kind}.py",
    }
    return Package(
        directory=parent / names["distribution"],
        files={path: _render(template, names) for path, template in files.items()},
        use=names["use"],
    )


def _render(template: str, names: Mapping[str, str]) -> str:
    text = (_TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(names)
