"""Dockerfiles: the instructions of one, with arguments and variables replaced."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from areal_gym.errors import SandboxError

_VARIABLE = re.compile(
    r"\\(?P<escaped>.)|\$(?:(?P<name>\w+)|\{(?P<braced>\w+)(?::(?P<sign>[-+])(?P<text>[^}]*))?\})"
)
_HEREDOC = re.compile(r"<<-?\s*[\"']?[A-Za-z_]")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction: `COPY --chown=1 a b` has the keyword, the flags and the rest as text."""

    line: int
    keyword: str
    flags: Mapping[str, str]
    text: str

    def words(self) -> list[str]:
        """Return the arguments of the instruction, which may be written as JSON."""
        if self.text.startswith("["):
            try:
                words = json.loads(self.text)
            except ValueError:
                words = None
            if isinstance(words, list) and all(isinstance(word, str) for word in words):
                return words
        return shlex.split(self.text)

    @property
    def is_list(self) -> bool:
        """Whether the arguments are written as JSON."""
        return self.text.startswith("[") and self.text.endswith("]")


def parse(text: str) -> list[Instruction]:
    """Return the instructions. Here-documents and other escapes: see `require_readable`."""
    instructions: list[Instruction] = []
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#") or (not line.strip() and pending):
            continue
        first = first if pending else number
        pending += line.rstrip()
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        if pending.strip():
            instructions.append(_instruction(first, pending.strip()))
        pending = ""
    if pending.strip():
        instructions.append(_instruction(first, pending.strip()))
    return instructions


def _instruction(line: int, text: str) -> Instruction:
    keyword, _, rest = text.partition(" ")
    rest = rest.strip()
    flags: dict[str, str] = {}
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        name, _, value = flag[2:].partition("=")
        flags[name] = value
        rest = rest.strip()
    return Instruction(line=line, keyword=keyword.upper(), flags=flags, text=rest)


def require_readable(text: str) -> None:
    """Raise SandboxError for what `parse` would misunderstand."""
    if re.match(r"#\s*escape\s*=", text):
        raise SandboxError("line 1: another escape character is not supported")
    for instruction in parse(text):
        is_shell = instruction.keyword in ("RUN", "COPY", "ADD")
        if is_shell and _HEREDOC.search(instruction.text):
            raise SandboxError(f"line {instruction.line}: here-documents are not supported")


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace `$NAME`, `${NAME}`, `${NAME:-other}` and `${NAME:+other}`; unknown ones are empty."""

    def replaced(match: re.Match[str]) -> str:
        if match["escaped"] is not None:
            return match["escaped"] if match["escaped"] == "$" else match[0]
        name = match["name"] or match["braced"]
        value = values.get(name, "")
        if match["sign"] == "-":
            return value or match["text"]
        if match["sign"] == "+":
            return match["text"] if value else ""
        return value

    return _VARIABLE.sub(replaced, text)


def pairs(instruction: Instruction, values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ENV, ARG or LABEL set; `ENV NAME text` is the old form."""
    words = shlex.split(instruction.text)
    if instruction.keyword == "ENV" and words and "=" not in words[0]:
        name, _, text = instruction.text.partition(" ")
        return {name: substitute(text.strip(), values)}
    split = (substitute(word, values).partition("=") for word in words)
    return {name: value for name, _, value in split}


def base_images(dockerfile: str, build_args: Mapping[str, str]) -> list[str]:
    """Return the images that a Dockerfile names after FROM; arguments before it are replaced."""
    values: dict[str, str] = {}
    images: list[str] = []
    stages: set[str] = set()
    for instruction in parse(dockerfile):
        if instruction.keyword == "ARG" and not images:
            for name, default in pairs(instruction, values).items():
                values[name] = build_args.get(name, default)
        elif instruction.keyword == "FROM" and instruction.text:
            words = substitute(instruction.text, values).split()
            if words and words[0] not in stages:
                images.append(words[0])
            if len(words) == 3 and words[1].upper() == "AS":
                stages.add(words[2])
    return images
