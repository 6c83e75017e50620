"""Compile and render a chat template: Jinja with Hugging Face's settings."""

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
"""The schemas of tools (`Tool.schema()`) for chat templates, in the environment's order."""

BREAK = "\ufdd0"
"""Marks a position in rendered text where encoding restarts, inside text that only looks like a
control token. Unicode reserves this code point, so no text contains it."""


class ChatTemplate:
    """Renders messages as text.

    Text of system, user and tool messages never becomes a control token: a page that a tool has
    read may contain `<|im_end|>`, which must not end a turn. `BREAK` splits such texts.

    Args:
        source: the template.
        special_tokens: names that the template may use, such as `bos_token`.
        control_tokens: texts that the tokenizer encodes as control tokens.
        kwargs: other variables of the template, such as `enable_thinking`.
        image_marks: texts that the template writes for images. In messages, also in the policy's,
            they are split, so they do not become placeholders.

    Raises:
        ConfigError: the template is not valid.
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
        """The message format that the template expects; `template_probe.find_dialect` sets it."""
        self._environment, self._template = _compile(source)
        self._variables = {**self._template.globals, **(special_tokens or {}), **(kwargs or {})}
        # The longest tokens come first, because one may begin with another.
        tokens = sorted((t for t in control_tokens if len(t) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        marks = sorted(image_marks, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._has_system = self._may_repeat_user = True
        user: Message = {"role": "user", "content": "Go on."}
        if self._accepts(user):
            self._has_system = self._accepts({"role": "system", "content": "Be exact."}, user)
            self._may_repeat_user = self._accepts(user, user)

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
        # This does the same as Template.render in a quarter of the time, without its new globals.
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
        except Exception as error:  # any exception is the template's fault
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses the roles {roles}: {error}") from error

    def _accepts(self, *messages: Message) -> bool:
        try:
            self.render(messages)
        except ConfigError:
            return False
        return True

    def _harmless(self, message: Message) -> Message:
        """Return the message with control tokens split, unless the policy has sampled them."""
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
    """Split tokens in all texts of a message, including those of its calls."""
    if isinstance(value, str):
        return _broken_up(value, tokens) if tokens.search(value) else value
    if isinstance(value, Mapping):
        return {name: _map_texts(item, tokens) for name, item in value.items()}
    return [_map_texts(item, tokens) for item in value] if isinstance(value, list) else value


def _compile(source: str) -> tuple[BoundedEnvironment, jinja2.Template]:
    """Compile a template with the settings and helpers that Hugging Face's templates need."""
    import jinja2

    from areal_gym.chat.jinja_limits import BoundedEnvironment

    environment = BoundedEnvironment()
    try:
        return environment, environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is broken, line {error.lineno}: {error}") from None
    # Jinja generates Python code, which may be nested too deeply for Python's compiler.
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
        raise ConfigError(f"the chat template is broken: {error}") from None
