"""The shape in which a chat template takes messages: templates differ in what they call a call."""

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
    """The shape that a template expects; the default is Hugging Face's convention."""

    has_text_arguments: bool = False
    """The arguments of calls are JSON text (DeepSeek); else they are objects."""
    has_null_content: bool = False
    """A call without words has no content at all (DeepSeek V3); else it is an empty text."""
    has_named_ids: bool = False
    """Ids of calls are `functions.NAME:INDEX` (Kimi), which the policy reads and writes."""
    is_one_text: bool = False
    """A turn with a call has one text, a thought or prose (gpt-oss); both are joined."""

    def adapt(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages as the template takes them."""
        adapted: list[dict[str, Any]] = []
        new_ids: dict[str, str] = {}
        names: dict[str, str] = {}
        num_calls = 0
        for message in messages:
            changed: dict[str, Any] = dict(message)
            calls = message.get("tool_calls")
            if "reasoning_content" in message:
                changed["thinking"] = message["reasoning_content"]  # gpt-oss's name for it
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
            if (called := message.get("tool_call_id")) is not None:
                changed["tool_call_id"] = new_ids.get(called, called)
                if called in names:
                    changed.setdefault("name", names[called])
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
    """Return the messages for a template that refuses some of them.

    Without `has_system`, what the system says begins the first user's message, as Gemma's models
    are used; unless `may_repeat_user`, several users' messages in a row are one.
    """
    if not has_system and messages and messages[0]["role"] == "system":
        system, *rest = messages
        asking: Message = {**system, "role": "user"}
        is_asked = bool(rest) and rest[0]["role"] == "user"
        messages = [_both(asking, rest[0]), *rest[1:]] if is_asked else [asking, *rest]
    if may_repeat_user:
        return messages
    changed: list[Message] = []
    for message in messages:
        if changed and changed[-1]["role"] == message["role"] == "user":
            changed[-1] = _both(changed[-1], message)
        else:
            changed.append(message)
    return changed


def _both(first: Message, second: Message) -> Message:
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
"""All styles of calls, the most usual first."""
