"""Sampled ids as text that can be shown while more is sampled.

What was shown is never taken back: a byte that is half a letter, the beginning of a stop string, a
text that may yet be a tool call, all are held back until it is clear what they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_gym.chat import Renderer
from areal_gym.chat.tool_call_formats import END_THINK, MARKERS, THINK, split_thinking
from areal_gym.types import Message

Delta = tuple[str, str]
"""("content" or "reasoning_content", a text to append to it)."""

_CONTEXT = 8
"""Ids before new ones that decoding may look at."""


class Reader:
    """Of one answer.

    Args:
        renderer: decodes.
        dialect: how calls are written in the text; None: it is raw, and nothing is read into it.
        stops: sampling ends where one of these is complete; it is not part of the text.
    """

    def __init__(self, renderer: Renderer, dialect: str | None, stops: Sequence[str] = ()) -> None:
        self.text = ""
        """What was read, without the stop."""
        self.stop: str | None = None
        """The stop string that was found."""
        self._renderer = renderer
        self._is_raw = dialect is None
        self._markers = () if dialect is None else MARKERS[dialect]
        self._stops = [stop for stop in stops if stop]
        self._opens_thinking = renderer.opens_thinking
        self._context: list[int] = []
        self._pending: list[int] = []
        self._shown = {"content": "", "reasoning_content": ""}

    def hear(self, token_ids: Sequence[int]) -> int | None:
        """Read new ids; how many of them it takes when a stop string ends the answer."""
        if not self._stops:
            self._read(token_ids)
            return None
        for index, token_id in enumerate(token_ids):
            searched_from = max(0, len(self.text) - max(map(len, self._stops)))
            self._read([token_id])
            places = [(self.text.find(stop, searched_from), stop) for stop in self._stops]
            found = min((place for place in places if place[0] >= 0), default=None)
            if found is not None:
                self.text, self.stop = self.text[: found[0]], found[1]
                return index + 1
        return None

    def news(self) -> list[Delta]:
        """What can be shown now and was not."""
        text = self.text
        if self.stop is None:
            text = text[: len(text) - _overlap(text, self._stops)]
        if self._is_raw:
            return self._show("content", text)
        thought, said = split_thinking(text, is_thinking=self._opens_thinking)
        if thought is None:
            start = text.lstrip()
            if THINK.startswith(start):  # also when there is nothing yet
                return []
        elif END_THINK not in text:
            thought = thought[: len(thought) - _overlap(thought, [END_THINK])].rstrip("\n")
            return self._show("reasoning_content", thought)
        news = self._show("reasoning_content", thought) if thought else []
        if self._markers:
            if said[:1].isspace():  # dropped, should a call follow
                return news
            at = min((i for marker in self._markers if (i := said.find(marker)) >= 0), default=-1)
            said = said[:at] if at >= 0 else said[: len(said) - _overlap(said, self._markers)]
            said = said.rstrip()
        return news + self._show("content", said)

    def rest(self, message: Message) -> list[Delta]:
        """What was not shown of the whole answer."""
        return [d for kind, text in deltas_of(message) for d in self._show(kind, text)]

    def _show(self, kind: str, whole: str) -> list[Delta]:
        shown = self._shown[kind]
        new = whole[len(shown) :] if whole.startswith(shown) else ""
        self._shown[kind] = shown + new
        return [(kind, new)] if new else []

    def _read(self, token_ids: Sequence[int]) -> None:
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
    """A whole message as what would have been shown of it."""
    both = [
        ("reasoning_content", message.get("reasoning_content", "")),
        ("content", message["content"]),
    ]
    return [delta for delta in both if delta[1]]


def _overlap(text: str, words: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a word."""
    longest = max(map(len, words), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        end = text[len(text) - size :]
        if any(word.startswith(end) for word in words):
            return size
    return 0
