"""Docstrings begin with a subject or a verb, and names say what a value is (CONTRIBUTING.md)."""

import ast
import re
from collections import Counter

import pytest

from tests._support.package_source import MODULES, folder, public_objects, source, tree

FRAGMENT_STARTS = {
    *("As", "By", "Does", "Endless", "For", "From", "Have", "How", "In", "Inside", "It", "Its"),
    *("Nothing", "Of", "See", "Something", "Than", "That", "These", "They", "Those", "Told"),
    *("Too", "What", "When", "Where", "Which", "Who", "Whom", "Whose", "Why", "With", "Without"),
}
"""First words of docstrings that have no subject of their own."""

VAGUE_NAMES = {"found", "told", "said"}
"""Names that tell how a value was come by, and not what it is."""

VAGUE_WORDS = re.compile(r"\b(nobody|somebody)(?!:)\b", re.I)

# Violations that are left in each top folder. They may only become fewer.
FRAGMENTS_LEFT: dict[str, int] = {}
VAGUE_NAMES_LEFT: dict[str, int] = {}
VAGUE_WORDS_LEFT: dict[str, int] = {
    "envs": 2,  # tau2's prompts, which past results were measured with
}


def fragments() -> list[tuple[str, str]]:
    """Return (module, message) of each docstring that begins with a fragment."""
    rows = []
    for module in MODULES:
        for name, node in public_objects(module):
            text = ast.get_docstring(node)
            first = text.split()[0].strip("`.,:;") if text else ""
            if first in FRAGMENT_STARTS:
                rows.append((module, f"{name}: {text.splitlines()[0]}"))
    return rows


def vague_names() -> list[tuple[str, str]]:
    """Return (module, message) of each variable, parameter or attribute with a vague name."""
    rows = []
    for module in MODULES:
        for node in ast.walk(tree(module)):
            name = None
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.attr
            if name is not None and name.strip("_") in VAGUE_NAMES:
                rows.append((module, f"{module}:{node.lineno}: {name}"))
    return rows


def vague_words() -> list[tuple[str, str]]:
    """Return (module, message) of each line that says nobody or somebody."""
    return [
        (module, f"{module}:{number}: {line.strip()}")
        for module in MODULES
        for number, line in enumerate(source(module).splitlines(), start=1)
        if VAGUE_WORDS.search(line)
    ]


@pytest.mark.parametrize(
    ("violations", "left"),
    [
        (fragments, FRAGMENTS_LEFT),
        (vague_names, VAGUE_NAMES_LEFT),
        (vague_words, VAGUE_WORDS_LEFT),
    ],
    ids=["docstring_fragments", "vague_names", "vague_words"],
)
def test_package_is_written_in_plain_words(violations, left):
    rows = violations()
    counts = Counter(folder(module) for module, _ in rows)
    excess = {name: n for name, n in counts.items() if n > left.get(name, 0)}
    messages = [message for module, message in rows if folder(module) in excess]
    assert not excess, "\n".join([f"more than allowed: {excess}", *messages])
