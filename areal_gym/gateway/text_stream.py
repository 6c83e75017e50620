"""Turn sampled token ids into text that can be sent while sampling continues.

Text that was sent cannot be withdrawn. An incomplete character, the possible beginning of a stop
string and the possible beginning of a tool call are therefore sent only once it is clear what they
are.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_gym.chat import Renderer
from areal_gym.chat.harmony import ENDS
from areal_gym.chat.tool_call_formats import DIALECTS, END_THINK, may_begin_thinking, split_thinking
from areal_gym.types import Message, text_of

Delta = tuple[str, str]
"""The pair ("content" or "reasoning_content", text to append to it)."""

_CONTEXT = 8
"""The number of previous ids on which the decoding of new ids may depend."""


class TextStream:
    """The text of one completion while it is sampled.

    Args:
        renderer: decodes token ids.
        dialect: the tool-call format of the text; None if the text is not parsed.
        stops: stop strings; sampling ends with the first of them, which is not part of the text.
    """

    def __init__(self, renderer: Renderer, dialect: str | None, stops: Sequence[str] = ()) -> None:
        self.text = ""
        """The text so far, without the stop string."""
        self.stop: str | None = None
        """The stop string that ended the text."""
        self._renderer = renderer
        self._is_raw = dialect is None
        self._dialect = dialect or "plain"
        self._markers = DIALECTS[self._dialect].markers
        self._stops = [stop for stop in stops if stop]
        self.is_thinking = renderer.opens_thinking
        """Whether the prompt ends inside a thought."""
        self._context: list[int] = []
        self._pending: list[int] = []
        self._sent = {"content": "", "reasoning_content": ""}

    def add(self, token_ids: Sequence[int]) -> int | None:
        """Add new ids; if a stop string ends the text, return the number of ids up to its end."""
        if not self._stops:
            self._decode(token_ids)
            return None
        for index, token_id in enumerate(token_ids):
            searched_from = max(0, len(self.text) - max(map(len, self._stops)))
            self._decode([token_id])
            matches = [(self.text.find(stop, searched_from), stop) for stop in self._stops]
            first = min((match for match in matches if match[0] >= 0), default=None)
            if first is not None:
                self.text, self.stop = self.text[: first[0]], first[1]
                return index + 1
        return None

    def new_deltas(self) -> list[Delta]:
        """Return the text that can be sent now and was not sent before."""
        text = self.text
        if self.stop is None:
            text = text[: len(text) - _overlap(text, self._stops)]
        if self._is_raw:
            return self._new_delta("content", text)
        thought, content = split_thinking(text, self._dialect, is_thinking=self.is_thinking)
        if thought is None:
            if may_begin_thinking(text):  # also when there is nothing yet
                return []
        elif not content and END_THINK not in text:
            ends = [END_THINK, *ENDS]
            thought = thought[: len(thought) - _overlap(thought, ends)].rstrip("\n")
            return self._new_delta("reasoning_content", thought)
        deltas = self._new_delta("reasoning_content", thought) if thought else []
        if self._markers:
            if content[:1].isspace():  # white space is dropped if a tool call follows
                return deltas
            calls = [i for marker in self._markers if (i := content.find(marker)) >= 0]
            end = min(calls) if calls else len(content) - _overlap(content, self._markers)
            content = content[:end].rstrip()
        return deltas + self._new_delta("content", content)

    def remaining_deltas(self, message: Message) -> list[Delta]:
        """Return the text of the complete message that was not sent yet."""
        return [d for field, text in deltas_of(message) for d in self._new_delta(field, text)]

    def _new_delta(self, field: str, text: str) -> list[Delta]:
        sent = self._sent[field]
        new = text[len(sent) :] if text.startswith(sent) else ""
        self._sent[field] = sent + new
        return [(field, new)] if new else []

    def _decode(self, token_ids: Sequence[int]) -> None:
        if token_ids and token_ids[-1] in self._renderer.stop_token_ids:
            token_ids = token_ids[:-1]
        self._pending += token_ids
        decode = self._renderer.tokenizer.decode
        before = decode(self._context)
        new = decode(self._context + self._pending)[len(before) :]
        if new and not new.endswith("\ufffd"):
            self.text += new
            self._context = (self._context + self._pending)[-_CONTEXT:]
            self._pending = []


def deltas_of(message: Message) -> list[Delta]:
    """Return the reasoning and the content of a complete message as deltas."""
    deltas = [
        ("reasoning_content", message.get("reasoning_content", "")),
        ("content", text_of(message["content"])),
    ]
    return [delta for delta in deltas if delta[1]]


def _overlap(text: str, words: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which one of the words begins."""
    longest = max(map(len, words), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - size :]
        if any(word.startswith(end) for word in words):
            return size
    return 0
