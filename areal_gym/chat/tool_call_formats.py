"""Reads an assistant's text: its thinking, its tool calls, and the prose around them."""

from __future__ import annotations

import json
import re
from typing import Any

from areal_gym.errors import ConfigError, did_you_mean
from areal_gym.types import Message
from areal_gym.utils.files import MAX_JSON_DEPTH, is_nested_deeper

DEFAULT_DIALECT = "hermes"
THINK, END_THINK = "<think>", "</think>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_FENCE = re.compile(r"^[ \t]*```(?:python|py)[ \t]*\n", re.MULTILINE)
_FENCE_END = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)
_LLAMA_CALL = re.compile(r'\{\s*"name"\s*:')
_MISTRAL_NAME = re.compile(r"([\w.-]{1,128})\s*(?:\[ARGS\])?\s*(?=\{)")
# Explaining a JSON error counts the lines before it, which adds up to a quadratic cost on a
# hostile megabyte of broken calls; more are not needed.
_MAX_MALFORMED = 8


_Parsed = tuple[str, list[tuple[str, dict[str, Any]]], str | None]
"""The text outside the calls, name and arguments of each call, and what was malformed."""


def parse_assistant(
    text: str, dialect: str = DEFAULT_DIALECT, *, is_thinking: bool = False
) -> Message:
    """Read an assistant's text: its thinking, its tool calls, and the prose around them.

    Dialects:

    - "hermes" (Qwen, too): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number;
    - "llama": a text that begins with `<|python_tag|>` or with a call is calls,
      `{"name": ..., "parameters": {...}}`, several separated by `;`;
    - "mistral": `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{...}`, any number;
    - "fenced": each closed ```` ```python ```` block is a call of the tool `python` with the
      argument `code`;
    - "plain": there are no calls.

    Thinking, `<think>...</think>` before everything else, goes to `reasoning_content`: a number or
    a call in the thoughts is no answer and no call. A block that is never closed (the turn was cut)
    is all thinking; a closing tag alone ends what a template has opened. `is_thinking` says that it
    has, so that without a closing tag, too, the text is all thinking.

    `content` is the text outside the well-formed calls, so that a number inside a call is never
    taken for an answer and a template that writes calls itself does not write them twice; without
    calls it is `text` unchanged. A malformed call stays in `content`, and `parse_error` explains
    the first one. Arguments are always an object; those given as JSON text are decoded.

    Never raises on any `text`; time is linear in its length.

    Raises:
        ConfigError: no such dialect.
    """
    require_dialect(dialect)
    thinking, text = split_thinking(text, is_thinking=is_thinking)
    content, calls, error = DIALECTS[dialect](text)
    message: Message = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {
                # Nine letters and digits: what Mistral's templates insist on.
                "id": f"call{index:05d}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    if error is not None:
        message["parse_error"] = error
    return message


def require_dialect(dialect: str) -> str:
    """Return the dialect if it exists.

    Raises:
        ConfigError: there is none of that name.
    """
    if dialect not in DIALECTS:
        raise ConfigError(
            f"no tool dialect {dialect!r}",
            hints=[did_you_mean(dialect, DIALECTS) or f"available: {', '.join(DIALECTS)}"],
        )
    return dialect


def write_call(name: str, arguments: dict[str, Any], dialect: str = DEFAULT_DIALECT) -> str:
    """Return the text of an assistant that calls a tool; `parse_assistant` reads it back.

    Raises:
        ConfigError: no such dialect, or it has no words for this call.
    """
    if require_dialect(dialect) == "fenced":
        if name != "python" or set(arguments) != {"code"}:
            raise ConfigError(f"in the dialect 'fenced' only python is called, not {name!r}")
        return f"```python\n{arguments['code']}\n```"
    if dialect == "plain":
        raise ConfigError("in the dialect 'plain' nothing is called")
    if dialect == "mistral":
        return f"{_TOOL_CALLS}{name}{_ARGS}{json.dumps(arguments, ensure_ascii=False)}"
    key = "parameters" if dialect == "llama" else "arguments"
    call = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
    return call if dialect == "llama" else f"{_OPEN}\n{call}\n{_CLOSE}"


def split_thinking(text: str, *, is_thinking: bool = False) -> tuple[str | None, str]:
    """Return the thinking (None: no thinking block) and the text after it."""
    start = text.find(THINK)
    end = text.find(END_THINK)
    if start >= 0 and not text[:start].strip() and (end < 0 or start < end):
        thought, closed, answer = text[start + len(THINK) :].partition(END_THINK)
        return thought.strip("\n"), answer.lstrip("\n") if closed else ""
    if end >= 0 and (start < 0 or end < start):
        return text[:end].strip("\n"), text[end + len(END_THINK) :].lstrip("\n")
    if is_thinking:
        return text.strip("\n"), ""
    return None, text


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
        return text, calls, errors[0] if errors else None
    outside.append(text[kept_from:])
    return "".join(outside).strip(), calls, errors[0] if errors else None


def _read_call(text: str, start: int) -> tuple[str, dict[str, Any], int]:
    """Return name, arguments and end of the call whose opening tag ends at `start`."""
    # The JSON is decoded before the closing tag is looked for: the tag may stand inside a string.
    call, end = _decode_json(text, _skip_space(text, start), "the tool call")
    end = _skip_space(text, end)
    if not text.startswith(_CLOSE, end):
        if _CLOSE in text[end:]:
            raise ValueError(f"there is text between the tool call's JSON and {_CLOSE}")
        raise ValueError(f"the tool call is never closed by {_CLOSE}")
    return *_named_arguments(call), end + len(_CLOSE)


def _named_arguments(call: Any, key: str = "arguments") -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call's JSON."""
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"a tool call is an object {_shape(key)}")
    arguments = call[key] if key in call else call.get("arguments", {})
    if isinstance(arguments, str):
        text = arguments
        arguments, rest = _decode_json(text, _skip_space(text, 0), "the arguments' text")
        if _skip_space(text, rest) != len(text):
            raise ValueError("there is text after the arguments' JSON")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a tool call are an object: {_shape(key)}")
    return name, arguments


def _shape(key: str) -> str:
    return f'{{"name": ..., "{key}": {{...}}}}'


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_MAX_DEPTH = MAX_JSON_DEPTH - 16
"""Limit for the depth of a call's JSON, below that of a request, which contains the call on its way
to a server."""
_decoder = json.JSONDecoder(parse_constant=_no_constant)


def _decode_json(text: str, start: int, what: str) -> tuple[Any, int]:
    try:
        value, end = _decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 20]
        raise ValueError(
            f"{what} is no JSON: {error.msg}, " + (f"at {near!r}" if near else "at its end")
        ) from None
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except ValueError as error:  # NaN, or an integer of thousands of digits
        raise ValueError(f"{what} is no JSON: {error}") from None
    if is_nested_deeper(value, _MAX_DEPTH):
        raise ValueError(f"{what} is nested too deeply")
    return value, end


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
        return text, calls, error
    outside.append(text[kept_from:])
    return "".join(outside).strip(), calls, error


def _parse_llama(text: str) -> _Parsed:
    start = _skip_space(text, 0)
    is_tagged = text.startswith(_PYTHON_TAG, start)
    if is_tagged:
        start += len(_PYTHON_TAG)
    elif not _LLAMA_CALL.match(text, start):
        return text, [], None
    calls: list[tuple[str, dict[str, Any]]] = []
    position = start
    while True:
        try:
            call, end = _decode_json(text, _skip_space(text, position), "the tool call")
            calls.append(_named_arguments(call, "parameters"))
        except ValueError as error:
            # An answer in JSON is no call; a text that begins like a call is meant as one.
            return text[position:].strip() if calls else text, calls, str(error)
        position = _skip_space(text, end)
        if not text.startswith(";", position):
            return text[position:].strip(), calls, None
        position += 1


def _parse_mistral(text: str) -> _Parsed:
    prose, marker, _ = text.partition(_TOOL_CALLS)
    if not marker:
        return text, [], None
    calls: list[tuple[str, dict[str, Any]]] = []
    position = len(prose)
    while text.startswith(_TOOL_CALLS, position):
        start = _skip_space(text, position + len(_TOOL_CALLS))
        try:
            if text.startswith("[", start):
                listed, end = _decode_json(text, start, "the list of tool calls")
                calls += [_named_arguments(call) for call in listed]
            else:
                named = _MISTRAL_NAME.match(text, start)
                if named is None:
                    raise ValueError(f"after {_TOOL_CALLS} comes a list, or name{_ARGS}{{...}}")
                arguments, end = _decode_json(text, named.end(), "the arguments")
                calls.append(_named_arguments({"name": named[1], "arguments": arguments}))
        except ValueError as error:
            kept = text if not calls else prose + text[position:]
            return kept if not calls else kept.strip(), calls, str(error)
        position = _skip_space(text, end)
    return (prose + text[position:]).strip(), calls, None


def _parse_plain(text: str) -> _Parsed:
    return text, [], None


DIALECTS = {
    "fenced": _parse_fenced,
    "hermes": _parse_hermes,
    "llama": _parse_llama,
    "mistral": _parse_mistral,
    "plain": _parse_plain,
}
"""Formats of tool calls in an assistant's text."""

MARKERS: dict[str, tuple[str, ...]] = {
    "fenced": ("```",),
    "hermes": (_OPEN,),
    "llama": (_PYTHON_TAG, "{"),
    "mistral": (_TOOL_CALLS,),
    "plain": (),
}
"""A text is certainly prose until one of its dialect's markers occurs; streaming depends on it."""
