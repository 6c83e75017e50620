"""What a chat template adds to a dialogue, as token ids.

    first prompt   the template's text of the first messages
    bridge         what it writes between the assistant's own text and its next turn: the end of
                   turn (unless it was sampled), the new messages, the header of the next turn

A bridge is read off a short reference dialogue, so its cost does not grow with the history. That
bridged turns are what the whole dialogue would have given is proven on generated dialogues, apart
for each kind of dialogue: with or without a system message, with these tools or none, and by who
replies. Where a template rewrites what it wrote before (Mistral's moves the tools to the newest
user message), the proof fails; `obstacle` says why, and `Dialogue` renders anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from areal_gym.chat import plain_tools
from areal_gym.chat import template_probe as proof
from areal_gym.chat.template import BREAK, ChatTemplate, ToolSchemas
from areal_gym.chat.tokenizer import FastTokenizer, Tokenizer
from areal_gym.chat.tokenizer_files import (
    read_chat_template,
    read_json,
    read_special_tokens,
    read_stop_ids,
)
from areal_gym.chat.tool_call_formats import DEFAULT_DIALECT, END_THINK, parse_assistant
from areal_gym.errors import ConfigError
from areal_gym.types import Message

_T = TypeVar("_T")
_CACHE_SIZE = 4096
_CACHED_TEXT = 512


class Renderer:
    """A tokenizer and the chat template that its policy was trained on.

    Example::

        renderer = Renderer.from_checkpoint(Path("my-checkpoint"))
        prompt = renderer.first_ids([{"role": "user", "content": "2+2?"}])
        generation = await engine.generate(prompt, ...)
        prompt += generation.token_ids
        prompt += renderer.bridge_ids(generation.token_ids[-1], reply)

    `Dialogue` does this, and falls back to whole dialogues where there is an `obstacle`.
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
    ) -> None:
        """Compile the template and look at what it does.

        Args:
            tokenizer: encodes and decodes.
            chat_template: jinja, in Hugging Face's dialect.
            special_tokens: names that the template may use, such as `bos_token`.
            stop_token_ids: ids that end a turn besides the template's own end of turn.
            template_kwargs: other variables of the template, such as `enable_thinking`.
            keeps_thinking: whether what was thought in earlier turns stays in the prompt. If not,
                the template decides, and a turn that follows a thought may begin a new branch.

        Raises:
            ConfigError: the template is no template, or has no end of turn that could be sampled.
        """
        self.tokenizer = tokenizer
        self.keeps_thinking = keeps_thinking
        self.template = ChatTemplate(
            chat_template,
            special_tokens=special_tokens,
            control_tokens=tokenizer.control_tokens,
            kwargs=template_kwargs,
        )
        self._bridges: dict[object, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._first: dict[object, tuple[int, ...]] = {}
        self._obstacles: dict[object, str | None] = {}
        self._lists_tools: dict[object, bool] = {}
        self._newest_tools: ToolSchemas = ()
        self._newest_key = ""
        self._has_call: dict[tuple[str, ...], bool] = {}
        self.knows_tool_role = proof.knows_tool_role(self.template)
        """Whether the template renders what a tool answers; else the user says it."""
        self.opening = proof.thinking_opening(self.template)
        """What the template writes of a turn's thinking before the policy begins, often nothing."""
        self.opens_thinking = bool(self.opening) and END_THINK not in self.opening
        """Whether the policy begins inside a thought."""
        self.end_of_turn = ""
        self.end_of_turn_id = self.encode(self.bridge_text([{"role": "user", "content": "x"}]))[0]
        """The id that the template writes after an assistant's text."""
        self.end_of_turn = tokenizer.decode([self.end_of_turn_id])
        proof.require_end_of_turn(self)
        self.stop_token_ids = tuple(sorted({self.end_of_turn_id, *stop_token_ids}))
        """Ids at which sampling of a turn ends."""
        self.written_dialect = proof.find_dialect(self)
        """How the template writes tool calls (`chat.tool_call_formats`); None if it does not."""
        self.tool_dialect = self.written_dialect or DEFAULT_DIALECT
        """How the policy is expected to write them."""
        self.before_answers = proof.written_before_answers(self)
        """What the template puts before an assistant's text: what is sampled holds it already."""
        self.drops_thinking = proof.drops_thinking(self)
        """Whether the template leaves the thinking of earlier turns out."""

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
            ConfigError: a file or the chat template is missing, or of no use.
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
        )

    # ---- ids ----------------------------------------------------------------------------------

    def first_ids(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> tuple[int, ...]:
        """Return the first prompt: `messages`, the description of `tools`, the assistant's header.

        Raises:
            ConfigError: the template refuses the messages.
        """
        key = _cache_key(messages)
        if key is not None:
            key = (key, self._key_of(tools))
        ids = self._first.get(key) if key is not None else None
        if ids is None:
            ids = tuple(self.encode(self.render(messages, tools)))
            if key is not None:
                _remember(self._first, key, ids)
        return ids

    def bridge_ids(self, last_id: int, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids between a sampled turn and the next.

        Args:
            last_id: the last id that was sampled. When it ends a turn, the template's end of turn
                is not written again; otherwise (the turn was cut) it is.
            messages: what the policy reads next.

        Raises:
            ConfigError: the template refuses the messages.
        """
        key = _cache_key(messages)
        bridge = self._bridges.get(key) if key is not None else None
        if bridge is None:
            ids = tuple(self.encode(self.bridge_text(messages)))
            bridge = ids, ids[1:]
            if key is not None:
                _remember(self._bridges, key, bridge)
        return bridge[last_id in self.stop_token_ids]

    def obstacle(
        self, first: Sequence[Message], tools: ToolSchemas, reply: Sequence[Message]
    ) -> str | None:
        """Why such a reply cannot be bridged in a dialogue that begins like this; None: it can."""
        has_system = any(message["role"] == "system" for message in first)
        key = (has_system, self._key_of(tools), reply_shape(reply))
        if key not in self._obstacles:
            found = proof.find_obstacle(self, has_system, tools, reply_shape(reply))
            _remember(self._obstacles, key, found)
        return self._obstacles[key]

    def remarks(self, first: Sequence[Message], tools: ToolSchemas = ()) -> list[str]:
        """What a person should know of dialogues that begin like this; often nothing."""
        remarks = []
        if self.drops_thinking and self.keeps_thinking:
            remarks.append(
                "the chat template drops the thinking of earlier turns; here it stays in the "
                "prompt, so that dialogues only grow (rollout.thinking=strip does as the template)"
            )
        if self.drops_thinking and not self.keeps_thinking:
            remarks.append(
                "earlier thinking is left out as the chat template does: a turn that follows a "
                "thought may begin a new branch (counted: rollout/forks)"
            )
        if tools and not self._lists(first, tools):
            remarks.append("the chat template knows no tools; the system message describes them")
        replies: list[Message] = [{"role": "user", "content": "x"}]
        if tools:
            replies.insert(0, {"role": "tool", "content": "x", "tool_call_id": "call00000"})
        for reply in replies:
            if obstacle := self.obstacle(first, tools, [reply]):
                remarks.append(
                    f"each turn after a message of the {reply['role']} begins a new branch "
                    f"(counted: rollout/forks), for {obstacle}"
                )
        return remarks

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; only what the template itself has written is a control token."""
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

    def parse(self, text: str, dialect: str | None = None) -> Message:
        """Return the message that a sampled text means; calls are in the model's dialect by
        default."""
        return parse_assistant(text, dialect or self.tool_dialect, is_thinking=self.opens_thinking)

    # ---- text ---------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> str:
        """Return the template's text of a whole dialogue, `BREAK`s included.

        Raises:
            ConfigError: the template refuses the messages.
        """
        if tools and not self._lists(messages, tools):
            messages, tools = plain_tools.describe(messages, tools), ()
        return self.template.render(self._adapt(messages), tools)

    def _key_of(self, tools: ToolSchemas) -> str:
        """Identifies tools. One episode's are mostly the next one's: comparing them is cheapest."""
        if tools != self._newest_tools:
            self._newest_tools, self._newest_key = tools, json.dumps(tools)
        return self._newest_key

    def bridge_text(self, reply: Sequence[Message]) -> str:
        """What a bridge is made of: the end of the assistant's turn, `reply`, the next header.

        Raises:
            ConfigError: the template refuses the messages.
        """
        reply = self._adapt(reply)
        shape = reply_shape(reply)
        if shape not in self._has_call:
            # Some templates refuse a tool's answer that no call has asked for, some refuse two
            # calls in one turn.
            has_call = "tool" in shape and proof.accepts_calls(self.template, reply)
            self._has_call[shape] = has_call
        answer = proof.reference_answer(reply, has_call=self._has_call[shape])
        text = self.template.render([{"role": "user", "content": "x"}, answer, *reply])
        _before, found, after = text.rpartition(proof.SENTINEL)
        at = after.find(self.end_of_turn)
        if not found or not after or at < 0:
            raise ConfigError(
                "the chat template writes nothing after an assistant's text, or not the text itself"
            )
        return after[at:]

    def _adapt(self, messages: Sequence[Message]) -> Sequence[Message]:
        """What tools say as the user's words, for a template that knows no tools."""
        if self.knows_tool_role or all(message["role"] != "tool" for message in messages):
            return messages
        return plain_tools.as_user(messages)

    def _lists(self, messages: Sequence[Message], tools: ToolSchemas) -> bool:
        """Return whether the template tells the policy of the tools."""
        has_system = any(message["role"] == "system" for message in messages)
        key = (has_system, self._key_of(tools))
        if key not in self._lists_tools:
            first = proof.first_messages(has_system)
            listed = self.template.render(first, tools)
            _remember(self._lists_tools, key, listed != self.template.render(first))
        return self._lists_tools[key]


def reply_shape(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the roles in order; of a run of the same role, two stand for more."""
    if len(messages) == 1:
        return (messages[0]["role"],)
    roles = [message["role"] for message in messages]
    return tuple(role for i, role in enumerate(roles) if roles[max(0, i - 2) : i] != [role] * 2)


def _cache_key(messages: Sequence[Message]) -> object | None:
    """Identifies short plain messages; None for those that are not worth keeping."""
    parts = []
    for message in messages:
        content = message["content"]
        if len(content) > _CACHED_TEXT or "tool_calls" in message:
            return None
        parts.append((message["role"], content, message.get("name"), message.get("tool_call_id")))
    return tuple(parts)


def _remember(cache: dict[object, _T], key: object, found: _T) -> None:
    if len(cache) >= _CACHE_SIZE:
        cache.clear()
    cache[key] = found
