"""The page that compares the ways to bring a task in counts the lines of real files."""

import ast
import re

import pytest

from tests._support.paths import ROOT

PAGE = (ROOT / "docs" / "ways-in.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| `(examples/[^`]+)` \| (\d+) \|", PAGE, re.MULTILINE)


def lines_of(path):
    """Count lines of code: without comments, docstrings and empty lines."""
    if path.is_dir():
        return sum(lines_of(file) for file in path.rglob("*") if file.is_file())
    text = path.read_text()
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.split("#!")[0].strip()}
    if path.suffix != ".py":
        return len(lines)
    lines -= {n for n, line in enumerate(text.splitlines(), 1) if line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_the_page_has_the_ways():
    assert len(ROWS) >= 6


@pytest.mark.parametrize(("path", "number"), ROWS)
def test_lines_are_counted(path, number):
    assert lines_of(ROOT / path) == int(number)
