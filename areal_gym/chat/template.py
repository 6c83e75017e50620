"""A chat template: jinja in Hugging Face's dialect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_gym.chat.message_style import MessageStyle, joined
from areal_gym.errors import ConfigError
from areal_gym.message_types import map_text
from areal_gym.types import Message

if TYPE_CHECKING:
    import jinja2

    from areal_gym.chat.jinja_limits import BoundedEnvironment

ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools as chat templates take them (`Tool.schema()`), in the environment's order."""

BREAK = "\ufdd0"
"""Marks where encoding restarts in rendered text: inside text that only looks like a control token.
Unicode sets this code point aside, so no text contains it."""


class ChatTemplate:
    """Renders messages as text.

    What users, tools and systems say never becomes a control token: a page that a tool has read
    may hold `<|im_end|>`, and must not end a turn by it. Such texts are broken up by `BREAK`.

    Args:
        source: the template.
        special_tokens: names that it may use, such as `bos_token`.
        control_tokens: texts that the tokenizer takes for tokens of their own.
        kwargs: its other variables, such as `enable_thinking`.
        image_marks: texts that stand for pictures. Only the template itself writes them: not even
            in what the policy has written do they become placeholders.

    Raises:
        ConfigError: the template is no template.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Iterable[str] = (),
        kwargs: Mapping[str, Any] | None = None,
        image_marks: Iterable[str] = (),
    ) -> None:
        self.source = source
        self.style = MessageStyle()
        """How the template wants messages; `template_probe.find_dialect` sets it."""
        self._environment, self._template = _compile(source)
        self._variables = {**self._template.globals, **(special_tokens or {}), **(kwargs or {})}
        # The longest first, so that a token which begins like another one is found whole.
        tokens = sorted((t for t in control_tokens if len(t) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        marks = sorted(image_marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._has_system = self._may_repeat_user = True
        asked: Message = {"role": "user", "content": "Go on."}
        if self._takes(asked):
            self._has_system = self._takes({"role": "system", "content": "Be exact."}, asked)
            self._may_repeat_user = self._takes(asked, asked)

    def render(
        self, messages: Sequence[Message], tools: ToolSchemas = (), *, adds_prompt: bool = True
    ) -> str:
        """Return the text of `messages`, with the header of the assistant's next turn at the end.

        Raises ConfigError if the template refuses the messages.
        """
        accepted = joined(
            [self._harmless(message) for message in messages],
            has_system=self._has_system,
            may_repeat_user=self._may_repeat_user,
        )
        # What Template.render does, without looking up all globals again: a quarter of its time.
        context = self._template.new_context(
            {
                **self._variables,
                "messages": self.style.adapt(accepted),
                "tools": list(tools) or None,
                "add_generation_prompt": adds_prompt,
            },
            shared=True,
        )
        try:
            with self._environment.limited():
                return self._environment.concat(self._template.root_render_func(context))
        except Exception as error:  # whatever it is, the template has caused it
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses the roles {roles}: {error}") from error

    def _takes(self, *messages: Message) -> bool:
        try:
            self.render(messages)
        except ConfigError:
            return False
        return True

    def _harmless(self, message: Message) -> Message:
        """Return the message with control tokens broken up, unless the policy has sampled them."""
        content = message["content"]
        if message["role"] == "assistant":
            return message if self._marks is None else _map_texts(message, self._marks)
        if self._control is None:
            return message
        control = self._control
        broken = map_text(content, lambda text: _broken_up(text, control))
        return message if broken == content else {**message, "content": broken}


def _broken_up(text: str, tokens: re.Pattern[str]) -> str:
    if BREAK in text:
        text = text.replace(BREAK, "\ufffd")
    return tokens.sub(lambda token: token[0][0] + BREAK + token[0][1:], text)


def _map_texts(value: Any, tokens: re.Pattern[str]) -> Any:
    """Break up tokens in all texts of a message, those of its calls, too."""
    if isinstance(value, str):
        return _broken_up(value, tokens) if tokens.search(value) else value
    if isinstance(value, Mapping):
        return {name: _map_texts(item, tokens) for name, item in value.items()}
    return [_map_texts(item, tokens) for item in value] if isinstance(value, list) else value


def _compile(source: str) -> tuple[BoundedEnvironment, jinja2.Template]:
    """Compile with the settings and helpers that Hugging Face's templates are written for."""
    import jinja2

    from areal_gym.chat.jinja_limits import BoundedEnvironment

    environment = BoundedEnvironment()
    try:
        return environment, environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is broken, line {error.lineno}: {error}") from None
    # Python compiles what jinja makes of the template, which may nest deeper than Python can.
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
        raise ConfigError(f"the chat template is broken: {error}") from None
