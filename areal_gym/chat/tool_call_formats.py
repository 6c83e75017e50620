"""Parse an assistant's text into its thinking, its tool calls, and the prose around them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from areal_gym.chat import harmony, json_calls, pythonic_calls, xml_calls
from areal_gym.chat.json_calls import Parsed
from areal_gym.chat.template import ToolSchemas
from areal_gym.errors import ConfigError, choices
from areal_gym.types import Message

DEFAULT_DIALECT = "hermes"
THINK, END_THINK = "<think>", "</think>"


class Dialect(NamedTuple):
    """A format of tool calls in an assistant's text."""

    parse: Callable[[str, ToolSchemas], Parsed]
    write: Callable[[str, dict[str, Any]], str] | None
    """Returns the text of a call; None if the dialect has no calls."""
    markers: tuple[str, ...]
    """The texts with which calls begin; text before any of them can be streamed as prose."""


def parse_assistant(
    text: str, dialect: str = DEFAULT_DIALECT, *, tools: ToolSchemas = (), is_thinking: bool = False
) -> Message:
    """Parse an assistant's text into its thinking, its tool calls, and the prose around them.

    Dialects (docs/rendering.md has a table of them):

    - "hermes" (Qwen 2.5 and 3): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`;
    - "qwen3-coder" (also Qwen 3.5) and "glm": each argument is text between tags; the schema in
      `tools` decides its type;
    - "deepseek-v3.2": each argument is between tags, which mark it as text or JSON;
    - "kimi", "deepseek" (V3, R1), "deepseek-v3.1", "phi4": JSON between the family's own tokens;
    - "harmony" (gpt-oss): a message to `functions.NAME`;
    - "llama": a text that begins with `<|python_tag|>` or with a call consists of calls,
      `{"name": ..., "parameters": {...}}`, separated by `;`;
    - "pythonic" (Llama 3.2 and 4): the text is a list of calls, `[name(key=value), ...]`;
    - "mistral": `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{...}`, any number;
    - "fenced": each closed ```` ```python ```` block is a call of the tool `python` with the
      argument `code`;
    - "plain": there are no calls.

    Thinking, `<think>...</think>` before everything else, goes to `reasoning_content`, so a number
    or a call in the thoughts is neither an answer nor a call. If the block is not closed (the turn
    was cut), the whole text is thinking. A closing tag alone ends a block that the template has
    opened. In gpt-oss's channels, "analysis" is thinking.

    `content` is the text outside the well-formed calls, so a number inside a call is not taken for
    an answer, and a template that writes calls does not write them twice. Without calls, it is
    `text` unchanged. A malformed call stays in `content`, and `parse_error` explains the first one.
    Arguments are always an object; JSON text is decoded.

    No `text` makes it raise, and its time is linear in the length.

    Args:
        text: the text of a turn.
        dialect: the format of tool calls.
        tools: the schemas of the tools.
        is_thinking: whether the template has opened the thinking block; without a closing tag, the
            whole text is then thinking.

    Raises:
        ConfigError: the dialect does not exist.
    """
    require_dialect(dialect)
    thinking, text = split_thinking(text, dialect, is_thinking=is_thinking)
    content, calls, error = DIALECTS[dialect].parse(text, tools)
    message: Message = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if calls:
        are_unique = len({call.id for call in calls}) == len(calls)
        message["tool_calls"] = [
            {
                # Mistral's templates require ids of nine letters and digits.
                "id": call.id if call.id and are_unique else f"call{index:05d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls)
        ]
    if error is not None:
        message["parse_error"] = error
    return message


def require_dialect(dialect: str) -> str:
    """Return the dialect if it exists, or raise ConfigError."""
    if dialect not in DIALECTS:
        raise ConfigError(f"no tool dialect {dialect!r}", hints=choices(dialect, DIALECTS))
    return dialect


def write_call(name: str, arguments: dict[str, Any], dialect: str = DEFAULT_DIALECT) -> str:
    """Return the text of a tool call, which `parse_assistant` can parse.

    Raises:
        ConfigError: the dialect does not exist, or it cannot express this call.
    """
    write = DIALECTS[require_dialect(dialect)].write
    if write is None:
        raise ConfigError(f"in the dialect {dialect!r} nothing is called")
    return write(name, arguments)


def split_thinking(
    text: str, dialect: str = "plain", *, is_thinking: bool = False
) -> tuple[str | None, str]:
    """Return the thinking, or None if there is no thinking block, and the text after it.

    A closing tag without an opening one may be part of a call's text in the dialect.
    """
    if harmony.has_channels(text):
        return harmony.split_channels(text)
    start = text.find(THINK)
    end = text.find(END_THINK)
    if start >= 0 and not text[:start].strip() and (end < 0 or start < end):
        thought, closed, answer = text[start + len(THINK) :].partition(END_THINK)
        return thought.strip("\n"), answer.lstrip("\n") if closed else ""
    if (
        end >= 0
        and (start < 0 or end < start)
        and (is_thinking or not _has_call(text[:end], dialect))
    ):
        return text[:end].strip("\n"), text[end + len(END_THINK) :].lstrip("\n")
    if is_thinking:
        return text.strip("\n"), ""
    return None, text


def _has_call(text: str, dialect: str) -> bool:
    """Return whether a call begins in `text`; one-letter markers count only at its beginning."""
    start = text.lstrip()
    return any(
        marker in text if len(marker) > 1 else start.startswith(marker)
        for marker in DIALECTS[dialect].markers
    )


def may_begin_thinking(text: str) -> bool:
    """Return whether an incomplete text may turn out to begin with a thought."""
    start = text.lstrip()
    return any(beginning.startswith(start) for beginning in (THINK, *harmony.BEGINNINGS))


def _untyped(parse: Callable[[str], Parsed]) -> Callable[[str, ToolSchemas], Parsed]:
    return lambda text, tools: parse(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _write_fenced(name: str, arguments: dict[str, Any]) -> str:
    if name != "python" or set(arguments) != {"code"}:
        raise ConfigError(f"in the dialect 'fenced' only python is called, not {name!r}")
    return f"```python\n{arguments['code']}\n```"


def _write_hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>"


def _write_deepseek(name: str, arguments: dict[str, Any]) -> str:
    return _DEEPSEEK.format(f"function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```")


def _write_deepseek_v31(name: str, arguments: dict[str, Any]) -> str:
    return _DEEPSEEK.format(f"{name}<｜tool▁sep｜>{_json(arguments)}")


_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def _write_kimi(name: str, arguments: dict[str, Any]) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
        f"<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|><|tool_calls_section_end|>"
    )


DIALECTS = {
    "fenced": Dialect(_untyped(json_calls.parse_fenced), _write_fenced, ("```",)),
    "hermes": Dialect(_untyped(json_calls.parse_hermes), _write_hermes, ("<tool_call>",)),
    "qwen3-coder": Dialect(
        xml_calls.parse_qwen3_coder, xml_calls.write_qwen3_coder, ("<tool_call>", "<function=")
    ),
    "glm": Dialect(xml_calls.parse_glm, xml_calls.write_glm, ("<tool_call>",)),
    "kimi": Dialect(
        _untyped(json_calls.parse_kimi),
        _write_kimi,
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_calls_section_end|>"),
    ),
    "deepseek": Dialect(_untyped(json_calls.parse_deepseek), _write_deepseek, ("<｜tool▁call",)),
    "deepseek-v3.1": Dialect(
        _untyped(json_calls.parse_deepseek_v31), _write_deepseek_v31, ("<｜tool▁call",)
    ),
    "deepseek-v3.2": Dialect(_untyped(xml_calls.parse_dsml), xml_calls.write_dsml, ("<｜DSML｜",)),
    "harmony": Dialect(
        _untyped(harmony.parse_harmony), harmony.write_harmony, ("<|start|>", *harmony.ENDS)
    ),
    "phi4": Dialect(
        _untyped(json_calls.parse_phi4),
        lambda name, arguments: (
            f"<|tool_call|>{_json({'name': name, 'arguments': arguments})}<|/tool_call|>"
        ),
        ("<|tool_call|>", "functools["),
    ),
    "llama": Dialect(
        _untyped(json_calls.parse_llama),
        lambda name, arguments: _json({"name": name, "parameters": arguments}),
        ("<|python_tag|>", "<|python_start|>", "{"),
    ),
    "pythonic": Dialect(
        _untyped(pythonic_calls.parse_pythonic),
        pythonic_calls.write_pythonic,
        ("<|python_start|>", "["),
    ),
    "mistral": Dialect(
        _untyped(json_calls.parse_mistral),
        lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}",
        ("[TOOL_CALLS]",),
    ),
    "plain": Dialect(lambda text, tools: Parsed(text, []), None, ()),
}
"""Formats of tool calls in an assistant's text, by name."""
