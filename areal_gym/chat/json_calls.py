"""Parse tool calls with JSON arguments, in the formats of the model families."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from areal_gym.utils.files import MAX_JSON_DEPTH, is_nested_deeper

# Parsing stops after this number of malformed calls: the message of each JSON error takes time
# proportional to the text before it, which is quadratic for a hostile text.
MAX_MALFORMED = 8
_MAX_DEPTH = MAX_JSON_DEPTH - 16
"""The maximum depth of a call's JSON; it is below that of a request to a server, which contains the
call."""

_FENCE = re.compile(r"^[ \t]*```(?:python|py)[ \t]*\n", re.MULTILINE)
_FENCE_END = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)
_LLAMA_CALL = re.compile(r'\{\s*"name"\s*:')
_MISTRAL_NAME = re.compile(
    r"([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*([A-Za-z0-9]{1,64})\s*)?(?:\[ARGS\])?\s*(?=\{)"
)
_KIMI_ID = re.compile(
    r"\s*((?:functions\.)?([^\s<>{}]{1,128}?):\d{1,9})\s*<\|tool_call_argument_begin\|>"
)
_DEEPSEEK_FENCED = re.compile(
    r"[^<\n]{0,64}<｜tool▁sep｜>\s*([^\s<>{}]{1,128})[ \t]*\n```json[ \t]*\n"
)
_DEEPSEEK_NAME = re.compile(r"\s*([^\s<>{}]{1,128})\s*<｜tool▁sep｜>")
_DEEPSEEK_END = re.compile(r"\s*(?:<｜tool▁call▁end｜>|(?=<｜tool▁calls▁end｜>))")


class Call(NamedTuple):
    """A tool call that the policy has written."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """The call's id, if the text has one."""


class Parsed(NamedTuple):
    """A text without its tool calls, the calls, and the first error."""

    content: str
    calls: list[Call]
    error: str | None = None


def scan(
    text: str,
    opening: re.Pattern[str],
    closing: str,
    read: Callable[[str, re.Match[str]], tuple[list[Call], int]],
    wrappers: tuple[str, ...] = (),
) -> Parsed:
    """Parse all calls that begin with `opening`.

    Args:
        text: the text of a turn.
        opening: matches the beginning of a call, or of several.
        closing: the end of a call; after a malformed call, parsing continues behind it.
        read: returns calls and the position after them; raises ValueError for a malformed call.
        wrappers: the texts around all calls.
    """
    outside: list[str] = []
    calls: list[Call] = []
    errors: list[str] = []
    kept_from = 0
    begin = opening.search(text)
    while begin is not None and len(errors) < MAX_MALFORMED:
        try:
            new_calls, end = read(text, begin)
        except ValueError as error:
            errors.append(str(error))
            end = text.find(closing, begin.end())
            if end < 0:
                break
            end += len(closing)
        else:
            calls += new_calls
            outside.append(text[kept_from : begin.start()])
            kept_from = end
        begin = opening.search(text, end)
    if not calls:
        if not errors and any(wrapper in text for wrapper in wrappers):
            errors.append(f"there is no tool call behind {wrappers[0]}")
        return Parsed(text, [], errors[0] if errors else None)
    outside.append(text[kept_from:])
    content = "".join(outside)
    for wrapper in wrappers:
        content = content.replace(wrapper, "")
    return Parsed(content.strip(), calls, errors[0] if errors else None)


# ---- formats -----------------------------------------------------------------------------------


def parse_hermes(text: str) -> Parsed:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    return scan(text, re.compile("<tool_call>"), "</tool_call>", _read_hermes)


def _read_hermes(text: str, begin: re.Match[str]) -> tuple[list[Call], int]:
    # Decode the JSON before searching the closing tag, which may also occur inside a string.
    call, end = decode_json(text, begin.end(), "the tool call")
    end = behind(text, end, "</tool_call>", "the tool call")
    return [named_arguments(call)], end


def parse_phi4(text: str) -> Parsed:
    """Parse `<|tool_call|>{...}<|/tool_call|>` (or a list) and `functools[{...}]`."""
    return scan(text, re.compile(r"<\|tool_call\|>|functools(?=\[)"), "<|/tool_call|>", _read_phi4)


def _read_phi4(text: str, begin: re.Match[str]) -> tuple[list[Call], int]:
    listed, end = decode_json(text, begin.end(), "the tool call")
    if begin[0] != "functools":
        end = behind(text, end, "<|/tool_call|>", "the tool call")
    return [named_arguments(call) for call in _nonempty(listed)], end


def parse_kimi(text: str) -> Parsed:
    """Parse Kimi's calls, whose ids, `functions.NAME:INDEX`, have the tools' names."""

    def read(text: str, begin: re.Match[str]) -> tuple[list[Call], int]:
        shape = "functions.NAME:INDEX<|tool_call_argument_begin|>{...}"
        named, call, end = _after_name(text, begin, _KIMI_ID, shape)
        end = behind(text, end, "<|tool_call_end|>", "the tool call")
        return [call._replace(name=named[2], id=named[1])], end

    wrappers = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    return scan(text, re.compile(r"<\|tool_call_begin\|>"), "<|tool_call_end|>", read, wrappers)


def _after_name(
    text: str, begin: re.Match[str], name: re.Pattern[str], shape: str
) -> tuple[re.Match[str], Call, int]:
    """Return the match of the name after `begin`, the call, and the position after its JSON."""
    named = name.match(text, begin.end())
    if named is None:
        raise ValueError(f"after {begin[0]} comes {shape}")
    arguments, end = decode_json(text, named.end(), "the arguments")
    return named, named_arguments({"name": named[1], "arguments": arguments}), end


def parse_deepseek(text: str) -> Parsed:
    """Parse the calls of DeepSeek V3 and R1, whose arguments are a fenced block of JSON."""
    return _scan_deepseek(text, _read_deepseek)


def parse_deepseek_v31(text: str) -> Parsed:
    """Parse the calls of DeepSeek V3.1: `NAME<｜tool▁sep｜>{...}`."""
    return _scan_deepseek(text, _read_deepseek_v31)


def _scan_deepseek(
    text: str, read: Callable[[str, re.Match[str]], tuple[list[Call], int]]
) -> Parsed:
    wrappers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    return scan(text, re.compile("<｜tool▁call▁begin｜>"), "<｜tool▁call▁end｜>", read, wrappers)


def _read_deepseek(text: str, begin: re.Match[str]) -> tuple[list[Call], int]:
    shape = "function<｜tool▁sep｜>NAME and a ```json block"
    _, call, end = _after_name(text, begin, _DEEPSEEK_FENCED, shape)
    return [call], _deepseek_end(text, behind(text, end, "```", "the block of JSON"))


def _read_deepseek_v31(text: str, begin: re.Match[str]) -> tuple[list[Call], int]:
    _, call, end = _after_name(text, begin, _DEEPSEEK_NAME, "NAME<｜tool▁sep｜>{...}")
    return [call], _deepseek_end(text, end)


def _deepseek_end(text: str, start: int) -> int:
    ended = _DEEPSEEK_END.match(text, start)
    if ended is None:
        raise ValueError("the tool call is never closed by <｜tool▁call▁end｜>")
    return ended.end()


def parse_llama(text: str) -> Parsed:
    """Parse a text that consists of calls, separated by `;` or nothing.

    Llama 4 writes prose between `<|python_start|>` and `<|python_end|>` before its calls.
    """
    prose = ""
    start = skip_space(text, 0)
    is_tagged = text.startswith("<|python_tag|>", start)
    if is_tagged:
        start += len("<|python_tag|>")
    elif text.startswith("<|python_start|>", start):
        is_tagged = True
        start = skip_space(text, start + len("<|python_start|>"))
        if not _LLAMA_CALL.match(text, start):
            before, closed, _ = text[start:].partition("<|python_end|>")
            prose = before.strip()
            start += len(before) + len(closed)
    if not is_tagged and not _LLAMA_CALL.match(text, start):
        return Parsed(text, [])
    calls: list[Call] = []
    position = start
    while True:
        try:
            call, end = decode_json(text, position, "the tool call")
            calls.append(named_arguments(call, "parameters"))
        except ValueError as error:
            # An answer in JSON is not a call; a text that begins as a call is a malformed one.
            return Parsed(text[position:].strip() if calls else text, calls, str(error))
        position = skip_space(text, end)
        if text.startswith(";", position):
            position += 1
        elif not _LLAMA_CALL.match(text, position):
            after = text[position:].removeprefix("<|python_end|>").strip()
            return Parsed("\n".join(part for part in (prose, after) if part), calls)


def parse_mistral(text: str) -> Parsed:
    """Parse `[TOOL_CALLS]` with a list of calls, or any number of `[TOOL_CALLS]name[ARGS]{...}`."""
    marker = "[TOOL_CALLS]"
    prose, is_marked, _ = text.partition(marker)
    if not is_marked:
        return Parsed(text, [])
    calls: list[Call] = []
    position = len(prose)
    while text.startswith(marker, position):
        start = skip_space(text, position + len(marker))
        try:
            if text.startswith("[", start):
                listed, end = decode_json(text, start, "the list of tool calls")
                calls += [
                    named_arguments(call)._replace(id=_mistral_id(call.get("id")))
                    for call in _nonempty(listed)
                ]
            else:
                named = _MISTRAL_NAME.match(text, start)
                if named is None:
                    raise ValueError(f"after {marker} comes a list, or name[ARGS]{{...}}")
                arguments, end = decode_json(text, named.end(), "the arguments")
                call = named_arguments({"name": named[1], "arguments": arguments})
                calls.append(call._replace(id=_mistral_id(named[2])))
        except ValueError as error:
            kept = text if not calls else (prose + text[position:]).strip()
            return Parsed(kept, calls, str(error))
        position = skip_space(text, end)
    return Parsed((prose + text[position:]).strip(), calls)


def _mistral_id(id: Any) -> str | None:
    """Return the id if Mistral's templates accept it, else None."""
    return id if isinstance(id, str) and re.fullmatch("[A-Za-z0-9]{9}", id) else None


def parse_fenced(text: str) -> Parsed:
    """Parse each closed ```` ```python ```` block as a call of the tool `python`."""
    return scan(text, _FENCE, "```", _read_fenced)


def _read_fenced(text: str, begin: re.Match[str]) -> tuple[list[Call], int]:
    closing = _FENCE_END.search(text, begin.end())
    if closing is None:
        raise ValueError("the ```python block is never closed by a line ```")
    return [Call("python", {"code": text[begin.end() : closing.start()]})], closing.end()


# ---- JSON --------------------------------------------------------------------------------------


def _nonempty(listed: Any) -> list[Any]:
    if listed == []:
        raise ValueError("the list of tool calls is empty")
    return listed if isinstance(listed, list) else [listed]


def named_arguments(call: Any, key: str = "arguments") -> Call:
    """Return the call of a JSON object; raise ValueError if the object is not a call."""
    shape = f'{{"name": ..., "{key}": {{...}}}}'
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"a tool call is an object {shape}")
    arguments = call[key] if key in call else call.get("arguments", {})
    if isinstance(arguments, str):
        text = arguments
        arguments, end = decode_json(text, 0, "the arguments' text")
        if skip_space(text, end) != len(text):
            raise ValueError("there is text after the arguments' JSON")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a tool call are an object: {shape}")
    return Call(name, arguments)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)


def decode_json(text: str, start: int, what: str) -> tuple[Any, int]:
    """Return the JSON value at `start`, after white space, and the position after it.

    Raises ValueError if there is no JSON, or it is nested too deeply; `what` is the noun for the
    value in the message.
    """
    try:
        value, end = _decoder.raw_decode(text, skip_space(text, start))
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


def behind(text: str, start: int, closing: str, what: str) -> int:
    """Return the position after `closing`; raise ValueError if other text comes before it."""
    start = skip_space(text, start)
    if text.startswith(closing, start):
        return start + len(closing)
    if closing in text[start:]:
        raise ValueError(f"there is text between {what}'s JSON and {closing}")
    raise ValueError(f"{what} is never closed by {closing}")


def skip_space(text: str, start: int) -> int:
    """Return the position of the first character from `start` on that is not white space."""
    end = start
    while end < len(text) and text[end] in " \t\r\n":
        end += 1
    return end
