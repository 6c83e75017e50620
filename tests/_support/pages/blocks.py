"""Finds the code of README and docs, block by block, in the order of the page."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests._support.paths import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])

_PROGRAM = r"(?:areal-gym|make|pip\ install|ray|python\ -m)\ |python\ (?:benchmarks|examples)/"
_BLOCK = re.compile(
    rf"""
    ^```(?P<fence>\w*)\n(?P<fenced>.*?)^```$
  | (?:\A|(?<=\n\n))(?P<indented>(?:[ ]{{4}}[^\n]*\n|\n(?=[ ]{{4}}))+)
  | (?<!`)`(?P<inline>(?:{_PROGRAM})[^`]+|\{{"[^`]*\}})`(?!`)
    """,
    re.S | re.M | re.X,
)
_LANGUAGES = {
    "shell": re.compile(rf"{_PROGRAM}|(?:source|cd|for)\ ", re.X),
    "json": re.compile(r'\{"'),
    "tree": re.compile(r"\S+/\n"),  # of files
    "agent": re.compile(r"\w+ = await episode\."),  # one line of an agent
}


@dataclass(frozen=True)
class Block:
    """A fenced, indented or inline piece of code."""

    page: Path
    line: int
    language: str
    """The fence's, or a key of `_LANGUAGES`, or "" (a drawing)."""
    text: str
    lead: str = ""
    """The line of text above the block."""
    kind: str = "fenced"
    """fenced, indented or inline."""

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
        kind = next(kind for kind in ("fenced", "indented", "inline") if match[kind] is not None)
        code = match[kind] if kind != "inline" else " ".join(match[kind].split())
        guesses = (name for name, start in _LANGUAGES.items() if start.match(code.lstrip()))
        language = (match["fence"] or next(guesses, "")).replace("bash", "shell")
        if kind == "inline" and language == "json" and not _is_json(code):
            continue  # "{...}" with names only
        line = text.count("\n", 0, match.end() - len(match[0].lstrip("\n"))) + 1
        lead = text[: match.start()].rstrip().rpartition("\n")[2]
        blocks.append(Block(page, line, language, code, lead, kind))
    return blocks


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
