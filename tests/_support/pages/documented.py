"""The code of README and docs, block by block, in the order of the page."""

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
  | (?<!`)`(?P<named>(?:{_PROGRAM})[^`]+|\{{"[^`]*\}})`(?!`)
    """,
    re.S | re.M | re.X,
)
_COMMAND = re.compile(rf"{_PROGRAM}|(?:source|cd|for)\ ", re.X)


@dataclass(frozen=True)
class Block:
    """One block of code, or what a sentence or a table tells to type."""

    page: Path
    line: int
    language: str
    """As it is fenced; else "shell", "json", "agent" (a line of its Python), "tree" (of files) or
    "" (a drawing)."""
    text: str
    lead: str = ""
    """The line above it that says something."""
    is_named: bool = False
    """In a sentence or a table."""
    is_fenced: bool = False

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}: {self.text.strip().splitlines()[0].strip()}"

    @property
    def commands(self) -> list[str]:
        """One a line; what goes on in the next line is one, what && joins are several."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [part.strip() for line in lines for part in line.split(" && ") if part.strip()]


def blocks_of(page: Path) -> list[Block]:
    """All of a page."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        code = match["fenced"] or match["indented"] or " ".join(match["named"].split())
        language = (match["fence"] or _language(code)).replace("bash", "shell")
        if match["named"] and language == "json" and not _is_json(code):
            continue  # "{...}" with names only
        number = text.count("\n", 0, match.end() - len(match[0].lstrip("\n"))) + 1
        lead = text[: match.start()].rstrip().rpartition("\n")[2]
        found.append(
            Block(
                page=page,
                line=number,
                language=language,
                text=code,
                lead=lead,
                is_named=match["named"] is not None,
                is_fenced=match["fenced"] is not None,
            )
        )
    return found


def _language(code: str) -> str:
    start = code.lstrip()
    kinds = {
        "shell": _COMMAND,
        "json": r'\{"',
        "tree": r"\S+/\n",
        "agent": r"\w+ = await episode\.",
    }
    return next((kind for kind, pattern in kinds.items() if re.match(pattern, start)), "")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
