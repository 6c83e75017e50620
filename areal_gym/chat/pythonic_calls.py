"""Parse and write tool calls in Python's syntax, the format of Llama 3.2 and 4."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from areal_gym.chat.json_calls import Call, Parsed, named_arguments

_MAX_CHARACTERS = 2**16
"""The maximum length of the calls, as Python's parser takes 100 bytes per character."""
_BEGINNING = re.compile(r"\s*(?:<\|python_start\|>\s*)?(\[\s*[A-Za-z_][\w.]*\()")
_JSON_WORDS = {"true": True, "false": False, "null": None}


def parse_pythonic(text: str) -> Parsed:
    """Parse `[name(key=value), ...]`, a text that is a list of calls in Python's syntax."""
    begin = _BEGINNING.match(text)
    if begin is None:
        return Parsed(text, [])
    source = text[begin.start(1) :].rstrip().removesuffix("<|python_end|>")
    try:
        return Parsed("", _python_calls(source))
    except ValueError as error:
        return Parsed(text, [], str(error))


def _python_calls(source: str) -> list[Call]:
    if len(source) > _MAX_CHARACTERS:
        raise ValueError(f"the tool calls have more than {_MAX_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about unknown escapes in strings
            tree = ast.parse(source.strip(), mode="eval").body
        calls = []
        for node in tree.elts if isinstance(tree, ast.List) else [tree]:
            if not isinstance(node, ast.Call) or node.args or not _dotted(node.func):
                raise ValueError("a tool call is name(key=value, ...)")
            arguments = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
            if any(keyword.arg is None for keyword in node.keywords):
                raise ValueError("a tool call names each argument: name(key=value, ...)")
            calls.append(named_arguments({"name": _dotted(node.func), "arguments": arguments}))
    except (SyntaxError, RecursionError, MemoryError, UnicodeError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise ValueError(f"the list of tool calls is no Python: {reason}") from None
    return calls


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _JSON_WORDS:
            return _JSON_WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(
            isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys
        ):
            return {key.value: _literal(v) for key, v in zip(keys, values, strict=True)}  # type: ignore[union-attr]
    raise ValueError("an argument of a tool call is a literal: text, number, list or dictionary")


def write_pythonic(name: str, arguments: dict[str, Any]) -> str:
    """Return a call in Python's syntax."""
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
