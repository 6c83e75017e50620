"""Tools for chat templates without tool support: the system message describes them, the user's turn
has the results.

Calls are then in Hermes' dialect, which most models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from areal_gym.chat.template import ToolSchemas
from areal_gym.types import Message

_HOW = """You may call these tools:
{tools}

To call one, write a JSON object between tags:
<tool_call>
{{"name": "the tool's name", "arguments": {{"its": "arguments"}}}}
</tool_call>
What it answers comes back between <tool_response> tags."""


def describe(messages: Sequence[Message], tools: ToolSchemas) -> list[Message]:
    """Return the messages with the tools described in the system message, which is added if
    missing."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _HOW.format(tools=listed)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def as_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool results as user messages, one message per run of results.

    What the user says right after them belongs to the same message: such templates often refuse two
    in a row.
    """
    changed: list[Message] = []
    is_answering = False
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        elif not (is_answering and message["role"] == "user"):
            is_answering = False
            changed.append(message)
            continue
        if is_answering:
            content = f"{changed.pop()['content']}\n{content}"
        changed.append({"role": "user", "content": content})
        is_answering = True
    return changed


def as_text(message: Message) -> Message:
    """Return an assistant's message with its calls written out in its content."""
    calls = [
        json.dumps(
            {key: call["function"][key] for key in ("name", "arguments")},
            ensure_ascii=False,
        )
        for call in message.get("tool_calls", [])
    ]
    parts = [message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return {"role": "assistant", "content": "\n".join(part for part in parts if part)}
