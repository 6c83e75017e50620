"""The message formats that chat templates expect; they differ in how they represent tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_gym.message_types import joined_content
from areal_gym.types import Message, ToolCall, text_of


@dataclass(frozen=True, slots=True)
class MessageStyle:
    """The message format that a template expects; the default is Hugging Face's convention."""

    has_text_arguments: bool = False
    """Whether the arguments of calls are JSON text (DeepSeek) instead of objects."""
    has_null_content: bool = False
    """Whether the content of a call without prose is None (DeepSeek V3) instead of empty text."""
    has_named_ids: bool = False
    """Whether ids of calls are `functions.NAME:INDEX` (Kimi), which the policy reads and writes."""
    is_one_text: bool = False
    """Whether a turn with a call can have only one text (gpt-oss), so thought and prose are joined.
    """

    def adapt(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages in the format that the template expects."""
        adapted: list[dict[str, Any]] = []
        new_ids: dict[str, str] = {}
        names: dict[str, str] = {}
        num_calls = 0
        for message in messages:
            changed: dict[str, Any] = dict(message)
            calls = message.get("tool_calls")
            if "reasoning_content" in message:
                changed["thinking"] = message["reasoning_content"]  # the name in gpt-oss's template
            if calls:
                changed["tool_calls"] = [
                    self._call(call, num_calls + i, new_ids) for i, call in enumerate(calls)
                ]
                names |= {call["id"]: call["function"]["name"] for call in calls}
                num_calls += len(calls)
                if self.is_one_text and changed.get("thinking") and message["content"]:
                    changed["thinking"] += f"\n{text_of(message['content'])}"
                    changed["content"] = ""
                if self.has_null_content and not message["content"]:
                    changed["content"] = None
            if (call_id := message.get("tool_call_id")) is not None:
                changed["tool_call_id"] = new_ids.get(call_id, call_id)
                if call_id in names:
                    changed.setdefault("name", names[call_id])
            adapted.append(changed)
        return adapted

    def _call(self, call: ToolCall, index: int, new_ids: dict[str, str]) -> dict[str, Any]:
        function: dict[str, Any] = dict(call["function"])
        id = call["id"]
        if self.has_text_arguments:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if self.has_named_ids:
            if not re.fullmatch(rf"(functions\.)?{re.escape(function['name'])}:\d+", id):
                id = f"functions.{function['name']}:{index}"
            new_ids[call["id"]] = id
        return {**call, "id": id, "function": function}


def joined(
    messages: Sequence[Message], *, has_system: bool, may_repeat_user: bool
) -> Sequence[Message]:
    """Join messages for a template that refuses some sequences of roles.

    Args:
        messages: the messages of a dialogue.
        has_system: whether the template accepts a system message; otherwise it is put in front of
            the first user message, as is usual for Gemma's models.
        may_repeat_user: whether the template accepts successive user messages; otherwise they are
            joined.
    """
    if not has_system and messages and messages[0]["role"] == "system":
        system, *rest = messages
        first: Message = {**system, "role": "user"}
        is_user_next = bool(rest) and rest[0]["role"] == "user"
        messages = [_merged(first, rest[0]), *rest[1:]] if is_user_next else [first, *rest]
    if may_repeat_user:
        return messages
    changed: list[Message] = []
    for message in messages:
        if changed and changed[-1]["role"] == message["role"] == "user":
            changed[-1] = _merged(changed[-1], message)
        else:
            changed.append(message)
    return changed


def _merged(first: Message, second: Message) -> Message:
    return {**first, "content": joined_content([first["content"], second["content"]], "\n\n")}


STYLES = [
    MessageStyle(
        has_text_arguments=has_text_arguments,
        has_null_content=has_null_content,
        has_named_ids=has_named_ids,
    )
    for has_named_ids in (False, True)
    for has_text_arguments in (False, True)
    for has_null_content in (False, True)
]
"""All formats of calls, the most common ones first."""
