"""Tools for chat templates without tool support: the system message describes them, the user's turn
has the results.

Calls are then in the dialect that the template writes in history (DeepSeek's describes no tools,
but writes calls), else in Hermes', which most models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from areal_gym.chat.template import ToolSchemas
from areal_gym.chat.tool_call_formats import write_call
from areal_gym.message_types import joined_content
from areal_gym.types import Message, text_of


def describe(
    messages: Sequence[Message], tools: ToolSchemas, dialect: str, *, has_tool_role: bool = False
) -> list[Message]:
    """Return the messages with the tools described in the system message, added if missing.

    Calls are in the format `dialect`; `has_tool_role` if the template renders results itself.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    how = "write a JSON object between tags" if dialect == "hermes" else "write"
    example = write_call("the tool's name", {"its": "arguments"}, dialect)
    text = f"You may call these tools:\n{listed}\n\nTo call one, {how}:\n{example}"
    if not has_tool_role:
        text += "\nWhat it answers comes back between <tool_response> tags."
    if messages and messages[0]["role"] == "system":
        both = joined_content([messages[0]["content"], text], "\n\n")
        return [{**messages[0], "content": both}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def as_user(messages: Sequence[Message], *, without_calls: bool = False) -> list[Message]:
    """Return the messages with tool results as user messages, one message per run of results.

    With `without_calls`, only results that no call has asked for: the explanation of a malformed
    call is one, and some templates refuse it.
    What the user says right after them belongs to the same message: such templates often refuse two
    in a row.
    """
    changed: list[Message] = []
    is_answering = has_call = False
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            has_call = without_calls and "tool_calls" in message
        if message["role"] == "tool" and not (has_call and "tool_call_id" in message):
            content = joined_content(["<tool_response>\n", content, "\n</tool_response>"], "")
        elif not (is_answering and message["role"] == "user"):
            is_answering = False
            changed.append(message)
            continue
        if is_answering:
            content = joined_content([changed.pop()["content"], content], "\n")
        changed.append({"role": "user", "content": content})
        is_answering = True
    return changed


def as_text(message: Message) -> Message:
    """Return an assistant's message with its calls written out in its content."""
    functions = (call["function"] for call in message.get("tool_calls", []))
    calls = (
        write_call(function["name"], function["arguments"], "hermes") for function in functions
    )
    return {
        "role": "assistant",
        "content": "\n".join(filter(None, (text_of(message["content"]), *calls))),
    }
