"""One dialogue as token ids: what was sent and sampled stays, what is new is appended.

    prompt(messages)  -> the ids to send: everything so far, and what the template adds
    answer(sampled)   -> the message that the sampled ids mean

Sampled ids are never encoded again. A dialogue forks only where it must: the agent has rewritten
what was said, the template rewrites its own earlier text (`Renderer.obstacle`), or earlier thinking
is to be left out. Then the whole dialogue is rendered; where its text only continues what was sent,
the rest is appended and nothing forks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from areal_gym.chat.renderer import Renderer, reply_shape
from areal_gym.chat.template import BREAK, ToolSchemas
from areal_gym.chat.tool_call_formats import END_THINK, THINK, split_thinking
from areal_gym.types import Message


@dataclass(slots=True)
class Prompt:
    """What is sent to the engine for one turn; read at once, and not kept."""

    token_ids: tuple[int, ...]
    added: tuple[int, ...]
    """Those at the end that nobody has sent or sampled before: all at the start of a branch."""
    branch: int
    """How often the dialogue has forked."""
    messages: Sequence[Message]
    """What is new: the whole dialogue, when history was replaced."""
    replaces_history: bool = False

    @property
    def num_kept(self) -> int:
        """How many leading ids were sent or sampled before; 0 at the start of a branch."""
        return len(self.token_ids) - len(self.added)


class _Ids:
    """Of one branch: the newest prompt and the answer to it. A branch only grows.

    A prompt takes the place of the ids that it begins with, answered or not: they are copied once,
    and kept once while the policy is asked. With many dialogues in flight, none of them in the
    processor's caches, ids are most of what a turn has to fetch from memory.
    """

    __slots__ = ("num_sent", "said", "sent")

    def __init__(self, sent: tuple[int, ...] = ()) -> None:
        self.sent = sent
        self.num_sent = len(sent)
        """How many of these there are without a prompt that has no answer yet."""
        self.said: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.num_sent + len(self.said)

    def all(self) -> tuple[int, ...]:
        """What was sent and answered, and the answer."""
        return self.sent[: self.num_sent] + self.said

    def prompt(self, new: tuple[int, ...]) -> tuple[int, ...]:
        """Return all of them and `new`, which are to be sent."""
        ids = self.sent[: self.num_sent] + (self.said + new)
        self.num_sent += len(self.said)
        self.sent, self.said = ids, ()
        return ids

    def answer(self, sent: tuple[int, ...], said: tuple[int, ...]) -> None:
        """Return the policy has said something to what was sent."""
        self.sent, self.num_sent, self.said = sent, len(sent), said


class Point(NamedTuple):
    """A moment of a dialogue, right after an answer. What it names only grows behind it."""

    ids: _Ids
    num_ids: int
    messages: list[Message]
    num_messages: int


class Dialogue:
    """Of one episode, or of one of several in it: see `fork`.

    Args:
        renderer: of the policy.
        tools: what the policy may call.
        dialect: how the policy writes calls; the model's own by default.
    """

    def __init__(
        self,
        renderer: Renderer,
        tools: ToolSchemas = (),
        *,
        dialect: str | None = None,
    ) -> None:
        self.messages: list[Message] = []
        """What the policy has read and said in it."""
        self._renderer = renderer
        self._tools = tools
        self._dialect = dialect or renderer.tool_dialect
        self._branch = 0
        self._ids = _Ids()
        self.is_own = True
        """False for a fork that the policy has not answered yet: its ids are another dialogue's."""
        self._has_thought = False
        self._texts: dict[int, tuple[Message, str]] = {}
        self._bridges: dict[tuple[str, ...], bool] = {}

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What was sent and sampled, in the newest branch."""
        return self._ids.all()

    def prompt(self, messages: Sequence[Message], *, replaces_history: bool = False) -> Prompt:
        """What to send so that the policy reads `messages` next.

        Args:
            messages: new ones; with `replaces_history`, all that the policy is to see. Messages of
                its own in there are those that `answer` gave, or made up.
            replaces_history: forget what was said before.

        Raises:
            ConfigError: the template refuses the messages.
        """
        before = self._ids
        if not before.num_sent:
            ids = self._renderer.first_ids(messages, self._tools)
            return Prompt(ids, ids, 0, messages, replaces_history)
        if not replaces_history and self._can_bridge(messages):
            last_id = (before.said or before.sent[: before.num_sent])[-1]
            bridge = self._renderer.bridge_ids(last_id, messages)
            return self._continued(bridge, messages)
        whole = messages if replaces_history else [*self.messages, *messages]
        text = self._renderer.render([self._as_written(m) for m in whole], self._tools)
        rest = _continuation(self._renderer.tokenizer.decode(self.token_ids), text)
        if rest is None:
            ids = tuple(self._renderer.encode(text))
            return Prompt(ids, ids, self._branch + 1, messages, replaces_history)
        return self._continued(tuple(self._renderer.encode(rest)), messages, replaces_history)

    def answer(
        self, prompt: Prompt, sampled_ids: Sequence[int], *, text: str | None = None
    ) -> Message:
        """Take in what the policy has sampled after `prompt`.

        `text` is what the agent takes of it, when that is less (up to a stop string).
        """
        if text is None:
            text = self._renderer.decode(sampled_ids)
        message = self._renderer.parse(text, self._dialect)
        self._has_thought |= "reasoning_content" in message
        self._texts[id(message)] = message, text
        self.is_own = True
        if prompt.branch != self._branch:
            self._branch = prompt.branch
            self._ids = _Ids()  # a new one: somebody may hold a point of the old branch
        self._ids.answer(prompt.token_ids, tuple(sampled_ids))
        if prompt.replaces_history:
            self.messages = []
        self.messages += [*prompt.messages, message]
        return message

    def here(self) -> Point:
        """Where the dialogue stands."""
        return Point(self._ids, len(self._ids), self.messages, len(self.messages))

    def stands_at(self, point: Point) -> bool:
        """Return whether nothing was said since."""
        return self._ids is point.ids and len(self._ids) == point.num_ids

    def fork(self, point: Point) -> Dialogue:
        """Another dialogue that goes on from an earlier point of this one.

        Its first prompt begins with the very ids that were sent and sampled until then.
        """
        other = Dialogue(self._renderer, self._tools, dialect=self._dialect)
        other._ids = _Ids(point.ids.all()[: point.num_ids])
        other.messages = point.messages[: point.num_messages]
        other.is_own, other._branch = False, -1
        other._has_thought, other._texts = self._has_thought, self._texts
        other._bridges = self._bridges
        return other

    def _continued(
        self, new_ids: tuple[int, ...], messages: Sequence[Message], replaces_history: bool = False
    ) -> Prompt:
        ids = self._ids.prompt(new_ids)
        if self.is_own:
            return Prompt(ids, new_ids, self._branch, messages, replaces_history)
        # What another dialogue has sampled is trained on there: here it is part of the prompt.
        return Prompt(ids, ids, self._branch + 1, messages, replaces_history)

    def _can_bridge(self, messages: Sequence[Message]) -> bool:
        if self._has_thought and not self._renderer.keeps_thinking:
            return False
        shape = reply_shape(messages)
        if shape not in self._bridges:
            obstacle = self._renderer.obstacle(self.messages, self._tools, messages)
            self._bridges[shape] = obstacle is None
        return self._bridges[shape]

    def _as_written(self, message: Message) -> Message:
        """Return a message of the policy with the text that it has written, for the template.

        Calls are handed over as objects where the template writes them in the policy's dialect.
        """
        _, text = self._texts.get(id(message), (message, ""))
        if not text:
            return message
        text = self._renderer.opening + text.removeprefix(self._renderer.before_answers)
        thought, said = split_thinking(text)
        if "tool_calls" in message and self._dialect == self._renderer.written_dialect:
            if not self._renderer.keeps_thinking or thought is None:
                return message
            content = f"{THINK}\n{thought}\n{END_THINK}\n\n{message['content']}"
            return {"role": "assistant", "content": content, "tool_calls": message["tool_calls"]}
        if self._renderer.keeps_thinking or thought is None:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": said, "reasoning_content": thought}


def _continuation(sent: str, whole: str) -> str | None:
    """What `whole` (with `BREAK`s) adds to `sent`; None when it does not begin with it."""
    plain = whole.replace(BREAK, "")
    if not plain.startswith(sent) or len(plain) == len(sent):
        return None
    num_left = len(plain) - len(sent)
    start = len(whole)
    while num_left:
        start -= 1
        num_left -= whole[start] != BREAK
    return whole[start:]
