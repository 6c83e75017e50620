"""Finds the dialogue that a list of messages continues.

A program behind the gateway sends the whole history with every call. The history is compared,
message by message, with the dialogues so far:

    it is a whole dialogue                        the dialogue continues, by ids
    it is a dialogue up to an earlier message     a fork, whose shared ids are trained on once
    it is unknown (another agent, a summary)      a new dialogue

The policy's messages are recognised by content, not by the ids of calls, which clients rewrite.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from areal_gym.chat import Dialogue, Prompt
from areal_gym.chat.dialogue import Point
from areal_gym.errors import ConfigError
from areal_gym.recording.recorder import RawText, Recorder
from areal_gym.types import ImagePart, Message, TextPart


class Conversations:
    """The dialogues of one episode; only the `max_points` newest answers can be continued."""

    def __init__(self, recorder: Recorder, *, max_points: int | None = None) -> None:
        self._recorder = recorder
        self._max_points = max_points
        self._points: OrderedDict[bytes, list[tuple[Dialogue, Point]]] = OrderedDict()
        self._busy: set[Dialogue] = set()
        self._texts: list[RawText] = []

    @contextmanager
    def continued(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], dialect: str | None
    ) -> Iterator[tuple[Dialogue, Prompt]]:
        """Yield the dialogue that `messages` continue and the prompt, or raise ConfigError."""
        # One key for each number of leading messages.
        keys = [*accumulate(messages, _next_key, initial=_digest(b"", [list(tools), dialect]))]
        dialogue, num_known = self._find(keys)
        is_new = dialogue is None
        if dialogue is None:
            dialogue = Dialogue(self._recorder.renderer, tools, dialect=dialect)
        new = messages[num_known:]
        if num_known and any(message["role"] == "assistant" for message in new):
            # The policy did not sample this answer, and the template is not proven to bridge it.
            prompt = dialogue.prompt([*dialogue.messages, *new], replaces_history=True)
        else:
            prompt = dialogue.prompt(new)
        self._busy.add(dialogue)
        num_before = len(dialogue.messages)
        try:
            yield dialogue, prompt
        finally:
            self._busy.discard(dialogue)
            if len(dialogue.messages) != num_before:
                self._remember(_next_key(keys[-1], dialogue.messages[-1]), dialogue)
            elif is_new or not dialogue.is_own:
                self._recorder.forget(dialogue)

    @contextmanager
    def continued_text(self, text: str) -> Iterator[tuple[RawText, Prompt]]:
        """Yield the raw text that `text` continues and the prompt; raise ConfigError if empty."""
        known = [raw for raw in self._texts if text.startswith(raw.text) and text != raw.text]
        raw = max(known, key=lambda raw: len(raw.text), default=None)
        if raw is None:
            raw = RawText(self._recorder.renderer)
        else:
            self._texts.remove(raw)  # no other call may continue it meanwhile
        before = raw.text
        try:
            prompt = raw.prompt(text)
            if not prompt.token_ids:
                raise ConfigError("the prompt is empty: there is nothing to continue")
            yield raw, prompt
        finally:
            if raw.text:
                self._texts.append(raw)
            if raw.text == before:
                self._recorder.forget(raw)
            if self._max_points is not None and len(self._texts) > self._max_points:
                self._recorder.forget(self._texts.pop(0))

    def _find(self, keys: Sequence[bytes]) -> tuple[Dialogue | None, int]:
        """Return the dialogue to continue, if known, and how many of its messages are known."""
        for num_known in range(len(keys) - 1, 0, -1):
            points = self._points.get(keys[num_known])
            if not points:
                continue
            for dialogue, point in reversed(points):
                if dialogue not in self._busy and dialogue.stands_at(point):
                    return dialogue, num_known
            dialogue, point = points[-1]
            return dialogue.fork(point), num_known
        return None, 0

    def _remember(self, key: bytes, dialogue: Dialogue) -> None:
        self._points.setdefault(key, []).append((dialogue, dialogue.here()))
        if self._max_points is not None and len(self._points) > self._max_points:
            _, forgotten = self._points.popitem(last=False)
            for old, point in forgotten:
                if old.stands_at(point):
                    self._recorder.forget(old)


def _next_key(before: bytes, message: Message) -> bytes:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    content = message["content"]
    named = content.strip() if isinstance(content, str) else [_named(part) for part in content]
    return _digest(before, [message["role"], named, calls])


def _named(part: TextPart | ImagePart) -> list[str]:
    return [part["type"], part["text"] if part["type"] == "text" else part["sha256"]]


def _digest(before: bytes, content: object) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return blake2b(before + text.encode(), digest_size=16).digest()
