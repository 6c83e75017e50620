"""Each message that docs/errors.md quotes is one of ours, as it is written in the code."""

import ast
import re
from functools import cache

import pytest

from areal_gym.cli.app import run
from tests._support.paths import ROOT

MESSAGES = re.findall(
    r"^\| `([^`]+)` \|",
    (ROOT / "docs" / "errors.md").read_text().partition("## It runs, but")[0],
    re.M,
)

PIECED = {
    "no environment ...": ["train", "--env", "tirr"],
    "unknown key ... in the settings": ["train", "--env", "tir", "trainer.lrr=1"],
}
"""Those that the code puts together, and what brings them about."""


def text_of(node):
    """The text of a literal, with `...` for what an f-string puts in."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr():
            return "".join(text_of(part) for part in node.values)
    return "..."


@cache
def texts():
    """All literals of the package; docstrings are none of them."""
    nodes = [
        node
        for file in (ROOT / "areal_gym").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
    ]
    said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        re.sub(r"(\.\.\.)+", "...", text_of(node))
        for node in nodes
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in said
    ]


@pytest.mark.parametrize(
    ("message", "argv"),
    PIECED.items(),
)
def test_messages_split_over_several_strings_are_joined(message, argv, capsys):
    assert message in MESSAGES
    assert run(argv) == 2
    assert re.search(message.replace("...", ".+"), capsys.readouterr().err)


@pytest.mark.parametrize("message", [m for m in MESSAGES if m not in PIECED])
def test_documented_message_is_in_the_code(message):
    assert any(message in text for text in texts())


def test_stale_message_is_detected():
    assert len(MESSAGES) > 40
    assert not any("no such file as yours: ..." in text for text in texts())
