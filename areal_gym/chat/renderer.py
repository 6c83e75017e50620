"""Render dialogues as token ids with a chat template, appending instead of rendering anew.

    first prompt   the template's text of the first messages
    bridge         its text between the assistant's own text and the next turn: the end of turn
                   (unless it was sampled), the new messages, the header of the next turn

A bridge is taken from a short reference dialogue, so its cost does not grow with the history.
Probes on generated dialogues (`template_probe`) test whether bridged turns equal the rendering of
the whole dialogue, separately with and without a system message, for each set of tools, and for the
roles of the reply. If a template rewrites its earlier text (Mistral's moves the tools to the newest
user message), the probe fails, `no_bridge_reason` returns the reason, and `Dialogue` renders anew.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_gym.chat import plain_tools, template_probe
from areal_gym.chat.template import BREAK, ChatTemplate, ToolSchemas
from areal_gym.chat.tokenizer import (
    FastTokenizer,
    Tokenizer,
    read_chat_template,
    read_json,
    read_special_tokens,
    read_stop_ids,
)
from areal_gym.chat.tool_call_formats import DEFAULT_DIALECT, END_THINK, parse_assistant
from areal_gym.chat.vision import Rendered, Vision, pictures, seen
from areal_gym.errors import ConfigError
from areal_gym.types import ImagePart, Message, images_of

_CACHE_SIZE = 4096
"""The maximum number of cached results of probes, as programs may use many sets of tools."""


class Renderer:
    """A tokenizer and the chat template that its policy was trained on.

    Example::

        renderer = Renderer.from_checkpoint(Path("my-checkpoint"))
        prompt = renderer.first_ids([{"role": "user", "content": "2+2?"}])
        generation = await engine.generate(prompt, ...)
        prompt += generation.token_ids
        prompt += renderer.bridge_ids(generation.token_ids[-1], reply)

    `Dialogue` does this, and falls back to whole dialogues where bridges are not exact.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        stop_token_ids: Iterable[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        keeps_thinking: bool = True,
        vision: Vision | None = None,
    ) -> None:
        """Compile the template and probe its behaviour.

        Args:
            tokenizer: the policy's tokenizer.
            chat_template: a Jinja template as in Hugging Face's checkpoints.
            special_tokens: names that the template may use, such as `bos_token`.
            stop_token_ids: ids that end a turn besides the template's own end of turn.
            template_kwargs: other variables of the template, such as `enable_thinking`.
            keeps_thinking: whether the thinking of earlier turns stays in the prompt. If not, the
                template decides, and a turn that follows a thought may begin a new branch.
            vision: how images are encoded for the policy; None refuses images.

        Raises:
            ConfigError: the template is invalid, or has no end of turn that could be sampled.
        """
        self.tokenizer = tokenizer
        self.keeps_thinking = keeps_thinking
        self.vision = vision
        """How images are encoded for the policy; None if it does not accept images."""
        self.template = ChatTemplate(
            chat_template,
            special_tokens=special_tokens,
            control_tokens=tokenizer.control_tokens,
            kwargs=template_kwargs,
            image_marks=() if vision is None else {vision.mark, vision.placeholder},
        )
        self._has_call: dict[tuple[str, ...], bool] = {}
        self._ends: re.Pattern[str] | None = None
        self._reason = functools.lru_cache(_CACHE_SIZE)(self._probe_bridges)
        self._tool_support = functools.lru_cache(_CACHE_SIZE)(self._probe_tools)
        self.opening = template_probe.thinking_opening(self.template)
        """The part of a turn's thinking that the template writes before the policy, often empty."""
        self.opens_thinking = bool(self.opening) and END_THINK not in self.opening
        """Whether the policy begins inside a thought, after a user's message."""
        self.end_of_turn = ""
        self.end_of_turn_id = self.encode(self.bridge_text([{"role": "user", "content": "x"}]))[0]
        """The id that the template writes after an assistant's text."""
        self.end_of_turn = tokenizer.decode([self.end_of_turn_id])
        stop_token_ids = [*stop_token_ids]
        self._set_ends(tokenizer.decode([id]) for id in stop_token_ids)
        self.written_dialect = template_probe.find_dialect(self)
        """The format of the template's tool calls (`chat.tool_call_formats`), or None."""
        self.tool_dialect = self.written_dialect or DEFAULT_DIALECT
        """The format in which the policy is expected to write tool calls."""
        self.turn_ends = template_probe.find_turn_ends(self, tokenizer.control_tokens)
        """The texts that end the policy's turns, by kind of turn."""
        ends = {self.encode(end)[0] for end in self.turn_ends[:2]} | {*stop_token_ids}
        self.stop_token_ids = tuple(
            sorted(ends if self.turn_ends.is_inner else ends | {self.end_of_turn_id})
        )
        """Ids at which sampling of a turn ends."""
        self._set_ends(tokenizer.decode([id]) for id in self.stop_token_ids)
        self.knows_tool_role = template_probe.knows_tool_role(self.template)
        """Whether the template renders tool results; else they become user messages."""
        self.image_roles = template_probe.image_roles(self)
        """The roles in whose messages the template writes images."""
        self.before_answers = template_probe.written_before_answers(self)
        """The template's text before an assistant's text, which sampled text already contains."""
        self.keeps_prose_as_text = template_probe.keeps_prose_as_text(self.template)
        """Whether a turn of prose and calls is passed to the template as text."""
        template_probe.require_end_of_turn(self)
        self.drops_thinking = template_probe.drops_thinking(self)
        """Whether the template leaves the thinking of earlier turns out."""

    def _set_ends(self, texts: Iterable[str]) -> None:
        ends = sorted({self.end_of_turn, *texts} - {""}, key=len, reverse=True)
        self._ends = re.compile("|".join(map(re.escape, ends))) if ends else None

    def end_in(self, text: str, start: int = 0) -> int:
        """Return the position of the first end of a turn in `text`; -1 if there is none."""
        end = self._ends.search(text, start) if self._ends else None
        return -1 if end is None else end.start()

    def last_end(self, text: str) -> int:
        """Return the position of the last end of a turn in `text`; -1 if there is none."""
        return max(text.rfind(end) for end in (self.end_of_turn, *self.turn_ends[:2]))

    def sampled_end_id(self, message: Message, reply: Message | None) -> int:
        """Return the id with which a policy ends a turn with this message, before this reply."""
        if self.turn_ends.is_by_reply:
            is_call = reply is not None and reply["role"] == "tool"
        else:
            is_call = "tool_calls" in message
        return self.encode(self.turn_ends.call if is_call else self.turn_ends.answer)[0]

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path | str,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        keeps_thinking: bool = True,
    ) -> Renderer:
        """Read `tokenizer.json`, `tokenizer_config.json` and the template of a Hugging Face model.

        Raises:
            ConfigError: a file or the chat template is missing or unusable.
        """
        directory = Path(directory)
        config = read_json(directory / "tokenizer_config.json")
        tokenizer = FastTokenizer(directory)
        special_tokens = read_special_tokens(config)
        stop_ids = read_stop_ids(directory)
        if "eos_token" in special_tokens:
            stop_ids += tokenizer.encode(special_tokens["eos_token"])[:1]
        return cls(
            tokenizer,
            read_chat_template(directory, config),
            special_tokens=special_tokens,
            stop_token_ids=stop_ids,
            template_kwargs=template_kwargs,
            keeps_thinking=keeps_thinking,
            vision=Vision.from_checkpoint(directory, tokenizer),
        )

    # ---- ids ----------------------------------------------------------------------------------

    def first_ids(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> tuple[int, ...]:
        """Return the first prompt: `messages`, the description of `tools`, the assistant's header.

        Raises:
            ConfigError: the template refuses the messages.
        """
        return self.first(messages, tools).token_ids

    def first(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> Rendered:
        """Return the ids of the first prompt with the positions of its images; see `first_ids`."""
        return self.encode_row(self.render(messages, tools), pictures(messages))

    def bridge_ids(self, last_id: int, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids between a sampled turn and the next; see `bridge`."""
        return self.bridge(last_id, messages).token_ids

    def bridge(self, last_id: int, messages: Sequence[Message]) -> Rendered:
        """Return the ids between a sampled turn and the next, with the positions of images.

        Args:
            last_id: the last id that was sampled. If it ends a turn, the template's end of turn is
                not written again; otherwise (the turn was cut) it is.
            messages: the messages that the policy reads next.

        Raises:
            ConfigError: the template refuses the messages.
        """
        ids, images = self.encode_row(self.bridge_text(messages), pictures(messages))
        is_ended = last_id in self.stop_token_ids and not self.turn_ends.is_by_reply
        if not (is_ended or last_id == ids[0]):
            return Rendered(ids, images)
        return Rendered(ids[1:], tuple(image.moved(-1) for image in images))

    def encode_row(self, text: str, images: Sequence[ImagePart]) -> Rendered:
        """Return the ids of rendered text, with the placeholders of its images expanded.

        Raises:
            ConfigError: the numbers of placeholders and images differ.
        """
        ids = self.encode(text)
        return Rendered(tuple(ids)) if self.vision is None else self.vision.expanded(ids, images)

    def no_bridge_reason(
        self, first: Sequence[Message], tools: ToolSchemas, reply: Sequence[Message]
    ) -> str | None:
        """Return the reason why a reply cannot be bridged after these messages; None if it can."""
        return self._reason(_has_system(first), json.dumps(tools), reply_shape(reply))

    def _probe_bridges(self, has_system: bool, tools: str, shape: tuple[str, ...]) -> str | None:
        return template_probe.find_difference(self, has_system, json.loads(tools), shape)

    def warnings(self, first: Sequence[Message], tools: ToolSchemas = ()) -> list[str]:
        """Return warnings about dialogues that begin with these messages and tools."""
        warnings = []
        if self.drops_thinking and self.keeps_thinking:
            warnings.append(
                "the chat template drops the thinking of earlier turns; here it stays in the "
                "prompt, so that dialogues only grow (rollout.thinking=strip does as the template)"
            )
        if self.drops_thinking and not self.keeps_thinking:
            warnings.append(
                "earlier thinking is left out as the chat template does: a turn that follows a "
                "thought may begin a new branch (counted: rollout/forks)"
            )
        if tools and not self._supports(first, tools):
            warnings.append("the chat template knows no tools; the system message describes them")
        replies: list[Message] = [{"role": "user", "content": "x"}]
        if tools:
            replies.insert(0, {"role": "tool", "content": "x", "tool_call_id": "call00000"})
        for reply in replies:
            if reason := self.no_bridge_reason(first, tools, [reply]):
                warnings.append(
                    f"each turn after a message of the {reply['role']} begins a new branch "
                    f"(counted: rollout/forks), for {reason}"
                )
        return warnings

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text; only the template's own text becomes control tokens."""
        ids: list[int] = []
        for part in text.split(BREAK):
            try:
                ids += self.tokenizer.encode(part)
            except (UnicodeEncodeError, TypeError):  # lone surrogates have no UTF-8
                ids += self.tokenizer.encode(part.encode("utf-8", "replace").decode())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids, without the stop token at the end."""
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids)

    def parse(
        self,
        text: str,
        dialect: str | None = None,
        *,
        tools: ToolSchemas = (),
        is_thinking: bool | None = None,
    ) -> Message:
        """Parse a sampled text into a message.

        Args:
            text: the text of a turn.
            dialect: the format of its calls; by default the model's.
            tools: the tools, whose schemas determine the types of untyped arguments.
            is_thinking: whether the prompt ends inside a thought (`is_inside_thought`); by default
                as it does after a user message.
        """
        if is_thinking is None:
            is_thinking = self.opens_thinking
        dialect = dialect or self.tool_dialect
        return parse_assistant(text, dialect, tools=tools, is_thinking=is_thinking)

    def is_inside_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the policy begins inside a thought after this prompt.

        Some templates open a thought only after a user message (DeepSeek R1).
        """
        if not self.opens_thinking:
            return False
        tail = self.tokenizer.decode(prompt_ids[-len(self.opening) - 8 :])
        return tail.endswith(self.opening)

    # ---- text ---------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> str:
        """Return the template's text of a whole dialogue, `BREAK`s included.

        Raises:
            ConfigError: the template refuses the messages.
        """
        if tools and not self._supports(messages, tools):
            messages = plain_tools.describe(
                messages, tools, self.tool_dialect, has_tool_role=self.knows_tool_role
            )
            tools = ()
        messages = self._adapt(messages)
        try:
            return self._image_text(self.template.render(messages, tools))
        except ConfigError:
            changed = plain_tools.as_user(messages, without_calls=True)
            if changed == list(messages):
                raise
            return self._image_text(self.template.render(changed, tools))

    def bridge_text(self, reply: Sequence[Message]) -> str:
        """Return the text of a bridge: the end of the assistant's turn, `reply`, the next header.

        Raises:
            ConfigError: the template refuses the messages.
        """
        # The explanation of a malformed call has no call, but templates need an id.
        reply = [
            {"tool_call_id": "call00000", **message} if message["role"] == "tool" else message
            for message in self._adapt(reply)
        ]
        shape = reply_shape(reply)
        if shape not in self._has_call:
            # Some templates refuse a tool result without a call, others two calls in a turn.
            is_result = any(message["role"] == "tool" for message in reply)
            has_call = is_result and template_probe.accepts_calls(self.template, reply)
            self._has_call[shape] = has_call
        answer = template_probe.reference_answer(reply, has_call=self._has_call[shape])
        first: Message = {"role": "user", "content": "x"}
        text = self._image_text(self.template.render([first, answer, *reply]))
        _before, sentinel, after = text.rpartition(template_probe.SENTINEL)
        start = self.end_in(after) if self._ends else 0
        if not sentinel or not after or start < 0:
            raise ConfigError(
                "the chat template writes nothing after an assistant's text, or not the text itself"
            )
        return after[start:]

    def _adapt(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Convert tool results to user messages for a template without tools.

        Images in messages of roles whose images the template drops are moved to a user message.

        Raises:
            ConfigError: there are images, and the policy does not accept any.
        """
        if any(not isinstance(message["content"], str) for message in messages):
            messages = seen(messages, self.vision, self.image_roles)
        if all(message["role"] != "tool" for message in messages) or self.knows_tool_role:
            return messages
        return plain_tools.as_user(messages)

    def _image_text(self, text: str) -> str:
        return text if self.vision is None else self.vision.processed(text)

    def _supports(self, messages: Sequence[Message], tools: ToolSchemas) -> bool:
        """Return whether the template describes the tools to the policy."""
        return self._tool_support(_has_system(messages), json.dumps(tools))

    def _probe_tools(self, has_system: bool, tools: str) -> bool:
        first = template_probe.first_messages(has_system)
        return self.template.render(first, json.loads(tools)) != self.template.render(first)


def _has_system(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "system" for message in messages)


def reply_shape(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the roles in order, with at most two successive equal ones.

    `template_probe.WITH_IMAGE` is added to the role of a message with images.
    """
    marks = {True: template_probe.WITH_IMAGE, False: ""}
    roles = [m["role"] + marks[bool(images_of(m["content"]))] for m in messages]
    return tuple(role for i, role in enumerate(roles) if roles[max(0, i - 2) : i] != [role] * 2)
