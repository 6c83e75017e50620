"""Tool calls with each argument between tags: the formats of Qwen3-Coder, GLM and DeepSeek V3.2.

The tool's JSON schema decides the argument's type; DeepSeek's tags mark texts. A text may contain a
tag, so an argument ends only at a tag that the next argument or the end of the call follows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal_gym.chat.json_calls import Call, Parsed, decode_json, scan, skip_space

_FUNCTION = re.compile(r"\s*<function=([^\s<>{}]{1,128})>\s*")
_QWEN_OPENING = re.compile(r"<tool_call>|<function=")
_QWEN_KEY = re.compile(r"<parameter=([^<>\n]{1,128})>\n?")
_QWEN_VALUE_END = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")
_QWEN_END = re.compile(r"</function>\s*</tool_call>|</function>(?!\s*</tool_call>)")
_GLM_OPENING = re.compile("<tool_call>")
_GLM_NAME = re.compile(r"\s*([^\s<>{}]{1,128})\s*(?=<arg_key>|</tool_call>)")
_GLM_KEY = re.compile(r"<arg_key>([^<>\n]{1,128})</arg_key>\s*<arg_value>")
_GLM_VALUE_END = re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>)")
_DSML_BLOCK = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
_DSML_OPENING = re.compile("<｜DSML｜invoke")
_DSML_NAME = re.compile(r'\s+name="([^"<>\n]{1,128})">\s*')
_DSML_KEY = re.compile(r'<｜DSML｜parameter name="([^"<>\n]{1,128})" string="(true|false)">')
_DSML_VALUE_END = re.compile(r"</｜DSML｜parameter>\s*(?=<｜DSML｜parameter|</｜DSML｜invoke>)")
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def parse_qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """Parse `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    def read(text: str, begin: re.Match[str]) -> tuple[list[Call], int]:
        has_tag = begin[0] == "<tool_call>"
        named = _FUNCTION.match(text, begin.end() if has_tag else begin.start())
        if named is None:
            raise ValueError("a tool call is <function=NAME>, its parameters, </function>")
        arguments, end = _arguments(text, named.end(), _QWEN_KEY, _QWEN_VALUE_END, "</parameter>")
        ended = _QWEN_END.match(text, end)
        if ended is None or (has_tag and not ended[0].endswith("</tool_call>")):
            closing = "</tool_call>" if ended else "</function>"
            raise ValueError(f"the tool call is never closed by {closing}")
        return [Call(named[1], _typed(arguments, named[1], tools))], ended.end()

    return scan(text, _QWEN_OPENING, "</tool_call>", read)


def parse_glm(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """Parse `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    def read(text: str, begin: re.Match[str]) -> tuple[list[Call], int]:
        named = _GLM_NAME.match(text, begin.end())
        if named is None:
            raise ValueError("a tool call is its tool's NAME, <arg_key> and <arg_value> for each")
        arguments, end = _arguments(text, named.end(), _GLM_KEY, _GLM_VALUE_END, "</arg_value>")
        if not text.startswith("</tool_call>", end):
            raise ValueError("the tool call is never closed by </tool_call>")
        return [Call(named[1], _typed(arguments, named[1], tools))], end + len("</tool_call>")

    return scan(text, _GLM_OPENING, "</tool_call>", read)


def parse_dsml(text: str) -> Parsed:
    """Parse a block of calls of DeepSeek V3.2: `<｜DSML｜invoke name="NAME">`, parameters, end."""

    def read(text: str, begin: re.Match[str]) -> tuple[list[Call], int]:
        named = _DSML_NAME.match(text, begin.end())
        if named is None:
            raise ValueError(f'a tool call is {begin[0]} name="NAME">, its parameters, its end')
        are_texts: dict[str, bool] = {}
        values, end = _arguments(
            text, named.end(), _DSML_KEY, _DSML_VALUE_END, "</｜DSML｜parameter>", are_texts
        )
        closing = "</｜DSML｜invoke>"
        if not text.startswith(closing, end):
            raise ValueError(f"the tool call is never closed by {closing}")
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            arguments[key] = value
            if not are_texts[key]:
                arguments[key], value_end = decode_json(value, 0, f"the argument {key!r}")
                if skip_space(value, value_end) != len(value):
                    raise ValueError(f"the argument {key!r} is no JSON: more follows its end")
        return [Call(named[1], arguments)], end + len(closing)

    return scan(text, _DSML_OPENING, "</｜DSML｜invoke>", read, _DSML_BLOCK)


def write_qwen3_coder(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call in Qwen3-Coder's format."""
    lines = [f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def write_glm(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call in GLM's format."""
    lines = [
        f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"


def write_dsml(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call in DeepSeek V3.2's format."""
    lines = [
        f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{_text(v)}'
        "</｜DSML｜parameter>"
        for k, v in arguments.items()
    ]
    call = "\n".join([f'<｜DSML｜invoke name="{name}">', *lines, "</｜DSML｜invoke>"])
    return "\n".join((_DSML_BLOCK[0], call, _DSML_BLOCK[1]))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _arguments(
    text: str,
    start: int,
    key: re.Pattern[str],
    value_end: re.Pattern[str],
    closing: str,
    are_texts: dict[str, bool] | None = None,
) -> tuple[dict[str, str], int]:
    """Return the arguments' texts and the position after the last one.

    `are_texts` is filled, for each argument, with whether DeepSeek's tag marks it as text.
    """
    arguments: dict[str, str] = {}
    while named := key.match(text, start):
        ended = value_end.search(text, named.end())
        if ended is None:
            raise ValueError(f"the argument {named[1]!r} is never closed by {closing}")
        if named[1] in arguments:
            raise ValueError(f"the argument {named[1]!r} is given twice")
        if are_texts is not None:
            are_texts[named[1]] = named[2] == "true"
        arguments[named[1]] = text[named.end() : ended.start()]
        start = ended.end()
    return arguments, start


def _typed(
    arguments: Mapping[str, str], name: str, tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the arguments with the types of the tool's schema.

    A text that cannot be parsed as its type stays text, and the tool refuses it with an error.
    """
    functions = (tool.get("function", tool) for tool in tools)
    schema = next((f.get("parameters") for f in functions if f.get("name") == name), None) or {}
    properties, definitions = schema.get("properties", {}), schema.get("$defs", {})
    return {
        key: _value(text, _types(properties[key], definitions)) if key in properties else text
        for key, text in arguments.items()
    }


def _types(schema: Any, definitions: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a schema allows; an empty set allows any."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(ref := schema.get("$ref"), str):
        return _types(definitions.get(ref.rpartition("/")[2]), definitions, depth + 1)
    if isinstance(kind := schema.get("type"), str):
        return {kind}
    if isinstance(kind, list | tuple):
        return set(kind)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return {_type_of(value) for value in values}
    options = [
        _types(option, definitions, depth + 1)
        for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
    ]
    return set().union(*options) if all(options) else set()


def _type_of(value: Any) -> str:
    default = "array" if isinstance(value, list) else "null" if value is None else "object"
    return _JSON_TYPES.get(type(value), default)


def _value(text: str, types: set[str]) -> Any:
    if types == {"string"}:
        return text
    word = text.strip()
    if word in _PYTHON_WORDS:  # Qwen3-Coder's template writes True and None as Python does
        value: Any = _PYTHON_WORDS[word]
    else:
        try:
            value, end = decode_json(text, 0, "the argument")
        except ValueError:
            return text
        if skip_space(text, end) != len(text) or isinstance(value, str):
            return text
    if isinstance(value, float) and not math.isfinite(value):
        return text
    if "string" in types and _type_of(value) not in types:
        return text
    return value
