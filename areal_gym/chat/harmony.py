"""The channels of gpt-oss ("harmony"): a turn is several messages, each with a header.

    <|channel|>analysis<|message|>THOUGHT<|end|>
    <|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>

The recipient may also come after the channel. A turn has at most one call, because `<|call|>` ends
the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from areal_gym.chat.json_calls import MAX_MALFORMED, Call, Parsed, decode_json

_START = "<|start|>assistant"
BEGINNINGS = ("<|channel|>", _START, " to=")
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TURN = re.compile(r"\s*(?:<\|start\|>assistant|<\|channel\|>|to=[^\s<]+\s*<\|channel\|>)")
_HEADER = re.compile(
    r"\s*(?:<\|start\|>assistant)?([^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
)
_END = re.compile(r"<\|(?:end|return|call)\|>(?=\s*<\|start\|>|\s*\Z)")


def has_channels(text: str) -> bool:
    """Return whether a turn is written in channels."""
    return _TURN.match(text) is not None


def split_channels(text: str) -> tuple[str | None, str]:
    """Return the thoughts of a turn, or None, and its prose followed by its calls as written.

    A header that is cut off is ignored, unless it has a recipient: then it is a broken call.
    """
    thoughts: list[str] = []
    prose: list[str] = []
    calls: list[str] = []
    num_malformed = start = 0
    while start < len(text) and num_malformed < MAX_MALFORMED:
        header = _HEADER.match(text, start)
        if header is None:
            if _recipient(text[start:]):
                calls.append(_as_call(text[start:]))
            start = len(text)
            break
        end = next_start = len(text)
        if recipient := _recipient(header[1]):
            try:  # a string in the arguments may contain the end of a message
                _, end = decode_json(text, header.end(), "")
            except ValueError:
                num_malformed += 1
                end = header.end()
        if (ended := _END.search(text, end if recipient else header.end())) is not None:
            end, next_start = ended.span()
        else:
            end = len(text)
        body = text[header.end() : end]
        if recipient:
            calls.append(_as_call(text[start:end]))
        elif "<|channel|>analysis" in header[1]:
            thoughts.append(body)
        else:
            prose.append(body)
        start = next_start
    if start < len(text):
        calls.append(_as_call(text[start:]))
    return "\n".join(thoughts) if thoughts else None, "\n".join(prose) + "".join(calls)


def parse_harmony(text: str) -> Parsed:
    """Parse the calls that `split_channels` puts at the end of a text."""
    calls: list[Call] = []
    errors: list[str] = []
    position = place = text.find(_START)
    if place < 0:
        return Parsed(text, [])
    while place >= 0 and not errors:
        header = _HEADER.match(text, place)
        try:
            if header is None:
                raise ValueError("the tool call ends in its header, before <|message|>")
            name = _recipient(header[1]).removeprefix("functions.")
            arguments, end = decode_json(text, header.end(), "the arguments")
            if not name or not isinstance(arguments, dict):
                raise ValueError("the arguments of a tool call are an object: {...}")
            if text[end:].strip() and not text[end:].lstrip().startswith(_START):
                raise ValueError("there is text after the arguments' JSON")
        except ValueError as error:
            errors.append(str(error))
        else:
            calls.append(Call(name, arguments))
            position = place = text.find(_START, end)
    content = text[: text.find(_START)] + (text[position:] if errors else "")
    return Parsed(content.strip() if calls else text, calls, errors[0] if errors else None)


def write_harmony(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a call after the header of a turn."""
    text = json.dumps(arguments, ensure_ascii=False)
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}"


def _recipient(header: str) -> str:
    named = re.search(r"(?:^|[\s>]|assistant)to=([^\s<]+)", header)
    return "" if named is None or named[1] == "assistant" else named[1]


def _as_call(text: str) -> str:
    text = text.strip()
    return text if text.startswith(_START) else f"{_START}{'' if text[:1] == '<' else ' '}{text}"
