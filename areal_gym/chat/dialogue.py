"""A dialogue as token ids: what was sent and sampled stays, new ids are appended.

    prompt(messages)  -> the ids to send: everything so far, and what the template adds
    answer(sampled)   -> the message that the sampled ids mean

Sampled ids are never encoded again. A dialogue forks only if the agent has rewritten earlier
messages, the template rewrites its own earlier text (`Renderer.no_bridge_reason`), or earlier
thinking is left out. Then the whole dialogue is rendered; if its text only continues what was sent,
the rest is appended and nothing forks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from areal_gym.chat.harmony import has_channels
from areal_gym.chat.renderer import Renderer, reply_shape
from areal_gym.chat.template import BREAK, ToolSchemas
from areal_gym.chat.tool_call_formats import END_THINK, THINK, split_thinking
from areal_gym.chat.vision import Rendered, pictures
from areal_gym.message_types import ImageRef, collapsed
from areal_gym.types import Message


@dataclass(slots=True)
class Prompt:
    """The ids that are sent to the engine for one turn."""

    token_ids: tuple[int, ...]
    added: tuple[int, ...]
    """The ids at the end that were never sent or sampled before: all at the start of a branch."""
    branch: int
    """Number of forks of the dialogue until now."""
    messages: Sequence[Message]
    """The new messages: the whole dialogue, when history was replaced."""
    replaces_history: bool = False
    images: tuple[ImageRef, ...] = ()
    """The pictures among all `token_ids`."""

    @property
    def added_images(self) -> tuple[ImageRef, ...]:
        """The pictures among `added`."""
        num_kept = self.num_kept
        return tuple(i.moved(-num_kept) for i in self.images if i.start >= num_kept)

    @property
    def num_kept(self) -> int:
        """Number of leading ids that were sent or sampled before; 0 at the start of a branch."""
        return len(self.token_ids) - len(self.added)


class Point(NamedTuple):
    """A moment of a dialogue, right after an answer; its lists only grow afterwards."""

    ids: list[int]
    num_ids: int
    messages: list[Message]
    num_messages: int
    images: tuple[ImageRef, ...] = ()


class Dialogue:
    """The dialogue of one episode, or one of several in it: see `fork`.

    Args:
        renderer: the policy's renderer.
        tools: the tools that the policy may call.
        dialect: the format of the policy's calls; the model's own by default.
    """

    def __init__(
        self, renderer: Renderer, tools: ToolSchemas = (), *, dialect: str | None = None
    ) -> None:
        self.messages: list[Message] = []
        """The messages that the policy has read and written."""
        self._renderer, self._tools = renderer, tools
        self._dialect = dialect or renderer.tool_dialect
        self._branch = 0
        self._ids: list[int] = []
        """The ids that were sent and sampled, in the newest branch."""
        self._images: tuple[ImageRef, ...] = ()
        """The pictures among them."""
        self.is_own = True
        """False for a fork that the policy has not answered yet: its ids are another dialogue's."""
        self._has_thought = False
        self._texts: dict[int, tuple[Message, str]] = {}
        self._bridges: dict[tuple[str, ...], bool] = {}

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that were sent and sampled, in the newest branch."""
        return tuple(self._ids)

    def prompt(self, messages: Sequence[Message], *, replaces_history: bool = False) -> Prompt:
        """Return the ids to send so that the policy reads `messages` next.

        Args:
            messages: the new messages; with `replaces_history`, all that the policy shall see. The
                policy's own messages are those that `answer` returned, or invented ones.
            replaces_history: forget the earlier messages.

        Raises:
            ConfigError: the template refuses the messages.
        """
        if not self._ids:
            ids, images = self._renderer.first(messages, self._tools)
            return Prompt(ids, ids, 0, messages, replaces_history, images)
        if not replaces_history and self._can_bridge(messages):
            bridge = self._renderer.bridge(self._ids[-1], self._named(messages))
            return self._continued(bridge, messages)
        whole = messages if replaces_history else [*self.messages, *messages]
        text = self._renderer.render([self._as_written(m) for m in whole], self._tools)
        shown = pictures(whole)
        # The text of two pictures is the same: their hashes tell them apart.
        num_sent, sent = len(self._images), [image.sha256 for image in self._images]
        rest = None
        if [image["sha256"] for image in shown[:num_sent]] == sent:
            sent_ids = collapsed(self._ids, self._images)
            rest = _continuation(self._renderer.tokenizer.decode(sent_ids), text)
        if rest is None:
            ids, images = self._renderer.encode_row(text, shown)
            return Prompt(ids, ids, self._branch + 1, messages, replaces_history, images)
        added = self._renderer.encode_row(rest, shown[num_sent:])
        return self._continued(added, messages, replaces_history)

    def answer(
        self, prompt: Prompt, sampled_ids: Sequence[int], *, text: str | None = None
    ) -> Message:
        """Append the ids that the policy has sampled after `prompt`, and return their message.

        `text` is the part that the agent takes, if it is less (up to a stop string).
        """
        if text is None:
            text = self._renderer.decode(sampled_ids)
        message = self._renderer.parse(
            text,
            self._dialect,
            tools=self._tools,
            is_thinking=self._renderer.is_inside_thought(prompt.token_ids),
        )
        self._has_thought |= "reasoning_content" in message
        self._texts[id(message)] = message, text
        self.is_own = True
        if prompt.branch != self._branch:
            self._branch = prompt.branch
            self._ids = []  # a new list: points of the old branch keep theirs
        self._images = prompt.images
        self._ids[prompt.num_kept :] = (*prompt.added, *sampled_ids)
        if prompt.replaces_history:
            self.messages = []
        self.messages += [*prompt.messages, message]
        return message

    def here(self) -> Point:
        """Return the dialogue's present point."""
        return Point(self._ids, len(self._ids), self.messages, len(self.messages), self._images)

    def stands_at(self, point: Point) -> bool:
        """Return whether nothing was appended since."""
        return self._ids is point.ids and len(self._ids) == point.num_ids

    def fork(self, point: Point) -> Dialogue:
        """Return another dialogue that continues from an earlier point of this one.

        Its first prompt begins with the same ids that were sent and sampled until then.
        """
        other = Dialogue(self._renderer, self._tools, dialect=self._dialect)
        other._ids = point.ids[: point.num_ids]
        other._images = point.images
        other.messages = point.messages[: point.num_messages]
        other.is_own, other._branch = False, -1
        other._has_thought, other._texts = self._has_thought, self._texts
        other._bridges = self._bridges
        return other

    def _continued(
        self, new: Rendered, messages: Sequence[Message], replaces_history: bool = False
    ) -> Prompt:
        ids, images = (*self._ids, *new.token_ids), self._images
        if new.images:
            images += tuple(image.moved(len(self._ids)) for image in new.images)
        if self.is_own:
            return Prompt(ids, new.token_ids, self._branch, messages, replaces_history, images)
        # What another dialogue has sampled is trained on there: here it is part of the prompt.
        return Prompt(ids, ids, self._branch + 1, messages, replaces_history, images)

    def _named(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the names of the tools whose results they are."""
        calls = [call for message in self.messages for call in message.get("tool_calls", [])]
        names = {call["id"]: call["function"]["name"] for call in calls}
        named: list[Message] = []
        for message in messages:
            name = message.get("name", names.get(message.get("tool_call_id", "")))
            named.append(message if name is None else {**message, "name": name})
        return named

    def _can_bridge(self, messages: Sequence[Message]) -> bool:
        if self._has_thought and not self._renderer.keeps_thinking:
            return False
        shape = reply_shape(messages)
        if shape not in self._bridges:
            reason = self._renderer.no_bridge_reason(self.messages, self._tools, messages)
            self._bridges[shape] = reason is None
        return self._bridges[shape]

    def _as_written(self, message: Message) -> Message:
        """Return a message of the policy with its sampled text, for the template.

        Calls are passed as objects if the template writes them in the policy's dialect.
        """
        _, text = self._texts.get(id(message), (message, ""))
        if not text or has_channels(text):
            return message
        text = self._renderer.opening + text.removeprefix(self._renderer.before_answers)
        thought, answer = split_thinking(
            text, self._dialect, is_thinking=bool(self._renderer.opening)
        )
        is_native = self._dialect == self._renderer.written_dialect
        is_text = message["content"] and self._renderer.keeps_prose_as_text
        if "tool_calls" in message and is_native and not is_text:
            if not self._renderer.keeps_thinking or thought is None:
                return message
            content = f"{THINK}\n{thought}\n{END_THINK}\n\n{message['content']}"
            return {"role": "assistant", "content": content, "tool_calls": message["tool_calls"]}
        if self._renderer.keeps_thinking or thought is None:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": answer, "reasoning_content": thought}


def _continuation(sent: str, whole: str) -> str | None:
    """Return what `whole` (with `BREAK`s) adds to `sent`; None if it does not begin with it."""
    plain = whole.replace(BREAK, "")
    if not plain.startswith(sent) or len(plain) == len(sent):
        return None
    num_left = len(plain) - len(sent)
    start = len(whole)
    while num_left:
        start -= 1
        num_left -= whole[start] != BREAK
    return whole[start:]
