"""A dialogue as token ids, to which new ids are appended; sampled ids are never encoded again.

    prompt(messages)  -> the ids to send: all ids so far, and those that the template adds
    answer(sampled)   -> the message of the sampled ids

The whole dialogue is rendered anew only if the agent has rewritten earlier messages, the template
rewrites its own earlier text (`Renderer.no_bridge_reason`), or earlier thinking is left out. If the
new text then begins with the text so far, the rest is appended; otherwise the dialogue forks.
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
    """The token ids that are sent to the engine for one turn."""

    token_ids: tuple[int, ...]
    added: tuple[int, ...]
    """The ids at the end that were not sent or sampled before; all ids at the start of a branch."""
    branch: int
    """The number of forks of the dialogue so far."""
    messages: Sequence[Message]
    """The new messages, or the whole dialogue if the history is replaced."""
    replaces_history: bool = False
    images: tuple[ImageRef, ...] = ()
    """The images in `token_ids`."""

    @property
    def added_images(self) -> tuple[ImageRef, ...]:
        """The images in `added`, with positions relative to it."""
        num_kept = self.num_kept
        return tuple(i.moved(-num_kept) for i in self.images if i.start >= num_kept)

    @property
    def num_kept(self) -> int:
        """The number of leading ids that were sent or sampled before; 0 at a branch's start."""
        return len(self.token_ids) - len(self.added)


class Point(NamedTuple):
    """The state of a dialogue after an answer, from which others can continue.

    The lists are the dialogue's own, which only grow, so their lengths at this time are stored.
    """

    ids: list[int]
    num_ids: int
    messages: list[Message]
    num_messages: int
    images: tuple[ImageRef, ...] = ()


class Dialogue:
    """A dialogue of an episode, which may have several, see `fork`.

    Args:
        renderer: the policy's renderer.
        tools: the tools that the policy may call.
        dialect: the format of the policy's calls; the model's own by default.
    """

    def __init__(
        self, renderer: Renderer, tools: ToolSchemas = (), *, dialect: str | None = None
    ) -> None:
        self.messages: list[Message] = []
        """The messages that the policy has read and written so far."""
        self._renderer, self._tools = renderer, tools
        self._dialect = dialect or renderer.tool_dialect
        self._branch = 0
        self._ids: list[int] = []
        """The ids that were sent and sampled in the newest branch."""
        self._images: tuple[ImageRef, ...] = ()
        """The images in `_ids`."""
        self.is_own = True
        """Whether the ids were sampled in this dialogue; False for a fork before its first answer.
        """
        self._has_thought = False
        self._texts: dict[int, tuple[Message, str]] = {}
        self._bridges: dict[tuple[str, ...], bool] = {}

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that were sent and sampled in the newest branch."""
        return tuple(self._ids)

    def prompt(self, messages: Sequence[Message], *, replaces_history: bool = False) -> Prompt:
        """Return the ids to send so that the policy reads `messages` next.

        Args:
            messages: the new messages; with `replaces_history`, all messages. The policy's messages
                are those that `answer` has returned, or others that the agent made up.
            replaces_history: whether the earlier messages are dropped.

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
        images_shown = pictures(whole)
        # All images have the same text, so their hashes are compared.
        num_sent, hashes = len(self._images), [image.sha256 for image in self._images]
        rest = None
        if [image["sha256"] for image in images_shown[:num_sent]] == hashes:
            sent_ids = collapsed(self._ids, self._images)
            rest = _continuation(self._renderer.tokenizer.decode(sent_ids), text)
        if rest is None:
            ids, images = self._renderer.encode_row(text, images_shown)
            return Prompt(ids, ids, self._branch + 1, messages, replaces_history, images)
        added = self._renderer.encode_row(rest, images_shown[num_sent:])
        return self._continued(added, messages, replaces_history)

    def answer(
        self, prompt: Prompt, sampled_ids: Sequence[int], *, text: str | None = None
    ) -> Message:
        """Append the ids that the policy has sampled after `prompt`, and return their message.

        `text` is the text of the message if it is only a part of the ids' text, up to a stop
        string.
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
        """Return the current point of the dialogue."""
        return Point(self._ids, len(self._ids), self.messages, len(self.messages), self._images)

    def stands_at(self, point: Point) -> bool:
        """Return whether nothing was appended since this point."""
        return self._ids is point.ids and len(self._ids) == point.num_ids

    def fork(self, point: Point) -> Dialogue:
        """Return another dialogue that continues from an earlier point of this one.

        Its first prompt begins with the ids that were sent and sampled up to this point.
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
        # Ids that another dialogue has sampled are trained on there; here they are a prompt.
        return Prompt(ids, ids, self._branch + 1, messages, replaces_history, images)

    def _named(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages, with the tools' names added to tool results."""
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
        """Return the policy's message with its sampled text, for the template.

        Tool calls are passed as objects if the template writes them in the policy's dialect.
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
    """Return the part of `whole` (with `BREAK`s) after `sent`; None if it begins otherwise."""
    plain = whole.replace(BREAK, "")
    if not plain.startswith(sent) or len(plain) == len(sent):
        return None
    num_left = len(plain) - len(sent)
    start = len(whole)
    while num_left:
        start -= 1
        num_left -= whole[start] != BREAK
    return whole[start:]
