"""How tool calls are written in an assistant's text."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from areal_gym.errors import ConfigError, did_you_mean
from areal_gym.types import Message, ToolCall

__all__ = ["DIALECTS", "parse_assistant"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FENCE = re.compile(r"^[ \t]*```(?:python|py)[ \t]*\n", re.MULTILINE)
_FENCE_END = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)
# Explaining a JSON error counts the lines before it, which adds up to a quadratic cost on a
# hostile megabyte of broken calls; nobody needs the ninth.
_MAX_MALFORMED = 8


class _Parsed(NamedTuple):
    content: str
    calls: list[tuple[str, dict[str, Any]]]
    error: str | None


def parse_assistant(text: str, dialect: str = "hermes") -> Message:
    """Read an assistant's text: its tool calls, and the prose around them.

    Dialects: "hermes" (also Qwen's), `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`,
    any number of them; "fenced", where each closed ```` ```python ```` block is a call of the tool
    `python` with the argument `code`.

    `content` is the text outside the well-formed calls, so that a number inside a call is never
    taken for an answer and a template that writes calls itself does not write them twice; without
    calls it is `text` unchanged. A malformed call stays in `content`, and `parse_error` explains
    the first one. Arguments are always an object; those given as JSON text are decoded.

    Never raises on any `text`; time is linear in its length.

    Raises:
        ConfigError: no such dialect.
    """
    if dialect not in DIALECTS:
        raise ConfigError(
            f"no tool dialect {dialect!r}",
            hints=[did_you_mean(dialect, DIALECTS) or f"there is: {', '.join(DIALECTS)}"],
        )
    parsed = DIALECTS[dialect](text)
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        message["tool_calls"] = [
            _tool_call(index, name, arguments)
            for index, (name, arguments) in enumerate(parsed.calls)
        ]
    if parsed.error is not None:
        message["parse_error"] = parsed.error
    return message


def _tool_call(index: int, name: str, arguments: dict[str, Any]) -> ToolCall:
    return {
        "id": f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _parse_hermes(text: str) -> _Parsed:
    outside: list[str] = []
    calls: list[tuple[str, dict[str, Any]]] = []
    errors: list[str] = []
    kept_from = 0
    start = text.find(_OPEN)
    while start >= 0 and len(errors) < _MAX_MALFORMED:
        try:
            name, arguments, end = _read_call(text, start + len(_OPEN))
        except ValueError as error:
            errors.append(str(error))
            end = text.find(_CLOSE, start + len(_OPEN))
            if end < 0:
                break
            end += len(_CLOSE)
        else:
            calls.append((name, arguments))
            outside.append(text[kept_from:start])
            kept_from = end
        start = text.find(_OPEN, end)
    if not calls:
        return _Parsed(text, calls, errors[0] if errors else None)
    outside.append(text[kept_from:])
    return _Parsed("".join(outside).strip(), calls, errors[0] if errors else None)


def _read_call(text: str, start: int) -> tuple[str, dict[str, Any], int]:
    """Name, arguments and end of the call whose opening tag ends at `start`."""
    shape = '{"name": ..., "arguments": {...}}'
    # The JSON is decoded before the closing tag is looked for: the tag may stand inside a string.
    call, end = _decode_json(text, _skip_space(text, start), "the tool call")
    end = _skip_space(text, end)
    if not text.startswith(_CLOSE, end):
        if _CLOSE in text[end:]:
            raise ValueError(f"there is text between the tool call's JSON and {_CLOSE}")
        raise ValueError(f"the tool call is never closed by {_CLOSE}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError(f"a tool call is an object {shape}")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments, rest = _decode_json(arguments, _skip_space(arguments, 0), "the arguments' text")
        if _skip_space(call["arguments"], rest) != len(call["arguments"]):
            raise ValueError("there is text after the arguments' JSON")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a tool call are an object: {shape}")
    return call["name"], arguments, end + len(_CLOSE)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)


def _decode_json(text: str, start: int, what: str) -> tuple[Any, int]:
    try:
        return _decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 20]
        raise ValueError(
            f"{what} is no JSON: {error.msg}, " + (f"at {near!r}" if near else "at its end")
        ) from None
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except ValueError as error:  # NaN, or an integer of thousands of digits
        raise ValueError(f"{what} is no JSON: {error}") from None


def _skip_space(text: str, start: int) -> int:
    end = start
    while end < len(text) and text[end] in " \t\r\n":
        end += 1
    return end


def _parse_fenced(text: str) -> _Parsed:
    outside: list[str] = []
    calls: list[tuple[str, dict[str, Any]]] = []
    error: str | None = None
    kept_from = 0
    opening = _FENCE.search(text)
    while opening is not None:
        closing = _FENCE_END.search(text, opening.end())
        if closing is None:
            error = "the ```python block is never closed by a line ```"
            break
        calls.append(("python", {"code": text[opening.end() : closing.start()]}))
        outside.append(text[kept_from : opening.start()])
        kept_from = closing.end()
        opening = _FENCE.search(text, kept_from)
    if not calls:
        return _Parsed(text, calls, error)
    outside.append(text[kept_from:])
    return _Parsed("".join(outside).strip(), calls, error)


DIALECTS = {"fenced": _parse_fenced, "hermes": _parse_hermes}
"""How tool calls can be written in an assistant's text."""
