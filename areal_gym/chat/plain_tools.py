"""Tools for chat templates without tool support.

The system message describes the tools, and user messages have their results. Calls are in the
dialect in which the template writes earlier calls (DeepSeek's template does so, but describes no
tools), or else in that of Hermes, which most models have been trained on.
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
    """Return the messages with a description of the tools in the system message.

    Args:
        messages: the messages of a dialogue; a system message is added if there is none.
        tools: the schemas of the tools.
        dialect: the format of calls.
        has_tool_role: whether the template renders tool results itself.
    """
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instruction = "write a JSON object between tags" if dialect == "hermes" else "write"
    example = write_call("the tool's name", {"its": "arguments"}, dialect)
    text = f"You may call these tools:\n{schemas}\n\nTo call one, {instruction}:\n{example}"
    if not has_tool_role:
        text += "\nWhat it answers comes back between <tool_response> tags."
    if messages and messages[0]["role"] == "system":
        content = joined_content([messages[0]["content"], text], "\n\n")
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def as_user(messages: Sequence[Message], *, without_calls: bool = False) -> list[Message]:
    """Return the messages with successive tool results joined into user messages.

    A user message right after them is joined, too, because such templates often refuse two in a
    row. With `without_calls`, only results without a call are changed: the explanation of a
    malformed call is such a result, which some templates refuse.
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
    """Return an assistant's message with its calls as text in its content."""
    functions = (call["function"] for call in message.get("tool_calls", []))
    calls = (
        write_call(function["name"], function["arguments"], "hermes") for function in functions
    )
    return {
        "role": "assistant",
        "content": "\n".join(filter(None, (text_of(message["content"]), *calls))),
    }
