"""Plain text that the policy continues: a dialogue without messages and without a template."""

from __future__ import annotations

from collections.abc import Sequence

from areal_gym.chat import Prompt, Renderer
from areal_gym.types import Message


class RawText:
    """One text, written in turns. As with a `Dialogue`, sampled ids are never encoded again."""

    def __init__(self, renderer: Renderer) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self._renderer = renderer

    def prompt(self, text: str) -> Prompt:
        """Return the prompt for which the policy continues `text`, which begins with this one."""
        new: list[Message] = [{"role": "user", "content": text[len(self.text) :]}]
        added = tuple(self._renderer.tokenizer.encode(text[len(self.text) :]))
        return Prompt((*self.token_ids, *added), added, 0, new)

    def answer(
        self, prompt: Prompt, sampled_ids: Sequence[int], *, text: str | None = None
    ) -> Message:
        """Append the tokens that the policy has sampled after `prompt`."""
        if text is None:
            text = self._renderer.decode(sampled_ids)
        self.token_ids += [*prompt.added, *sampled_ids]
        self.text += prompt.messages[0]["content"] + text
        return {"role": "assistant", "content": text}
