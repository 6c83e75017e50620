"""A written dialogue as token ids, as if a policy had sampled the assistant's turns.

The same path as in an episode (`Dialogue`): what the assistant says is encoded apart from what it
reads, and ends with the end of turn, so that a policy which learns from transcripts is asked, in
episodes, exactly what it has seen. Where the template rewrites its earlier text the dialogue forks,
and there is one transcript for each branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_gym.chat import plain_tools
from areal_gym.chat.dialogue import Dialogue
from areal_gym.chat.renderer import Renderer
from areal_gym.chat.template import BREAK, ToolSchemas
from areal_gym.chat.tool_call_formats import END_THINK, THINK
from areal_gym.errors import ConfigError, DataError
from areal_gym.message_types import ImageRef
from areal_gym.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """One branch of a dialogue; both tuples have its length T."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """True on the assistant's tokens, ends of its turns included."""
    num_prompt: int
    """Number of tokens before the assistant's first."""
    images: tuple[ImageRef, ...] = ()
    """The pictures among the tokens."""


def transcribe(
    renderer: Renderer, messages: Sequence[Message], tools: ToolSchemas = (), *, num_given: int = 0
) -> list[Transcript]:
    """Return a dialogue's branches, mostly one; what follows the last assistant turn is left out.

    The first `num_given` messages belong to the prompt, whoever said them.

    Raises:
        DataError: the assistant says nothing, or speaks first, or twice in a row.
        ConfigError: the template refuses the messages.
    """
    dialogue = Dialogue(renderer, tools)
    transcripts: list[Transcript] = []
    ids: list[int] = []
    mask: list[bool] = []
    images: tuple[ImageRef, ...] = ()
    num_prompt = 0
    new: list[Message] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or place < num_given:
            new.append(message)
            continue
        if not new:
            raise DataError(
                "the assistant speaks first"
                if place == 0
                else f"the assistant speaks twice in a row (message {place + 1})"
            )
        prompt = dialogue.prompt(new)
        reply = messages[place + 1] if place + 1 < len(messages) else None
        end_id = renderer.sampled_end_id(message, reply)
        sampled = [*renderer.encode(sampled_text(renderer, message)), end_id]
        dialogue.answer(prompt, sampled)
        if not prompt.num_kept:
            if ids:
                transcripts.append(_transcript(ids, mask, num_prompt, images))
            ids, mask, num_prompt = [], [], len(prompt.token_ids)
        ids += (*prompt.added, *sampled)
        mask += [False] * len(prompt.added) + [True] * len(sampled)
        images = prompt.images
        new = []
    if not ids:
        raise DataError("the assistant says nothing in it: there is nothing to learn")
    return [*transcripts, _transcript(ids, mask, num_prompt, images)]


def sampled_text(renderer: Renderer, message: Message) -> str:
    """Return the text that a policy would sample, up to the end of turn, to send this message.

    Calls and thinking are in the template's own words where it has some.

    Raises:
        ConfigError: the template does not write the message after the header of a turn.
    """
    asked: list[Message] = [{"role": "user", "content": "x"}]
    template = renderer.template
    if "tool_calls" in message and renderer.written_dialect is None:
        message = plain_tools.as_text(message)
    header = template.render(asked).removesuffix(renderer.opening)
    text = template.render([*asked, message], adds_prompt=False)
    spoken = text.removeprefix(header)
    end = len(spoken) if renderer.turn_ends.is_by_reply else renderer.last_end(spoken)
    if not text.startswith(header) or end < 0:
        raise ConfigError(
            "the chat template writes an assistant's message in history otherwise than it is asked "
            f"for: {text[:60]!r} does not begin with {header[:60]!r}"
        )
    spoken = spoken[:end].replace(BREAK, "")
    thought = message.get("reasoning_content", "")
    if thought.strip() not in spoken:  # some templates never write thoughts in history
        spoken = f"{THINK}\n{thought}\n{END_THINK}\n\n{spoken}"
    if spoken.startswith(renderer.opening):
        return spoken.removeprefix(renderer.opening)
    # The header has opened a thought that this message does not have.
    return spoken if END_THINK in renderer.opening else f"\n{END_THINK}\n\n{spoken.lstrip()}"


def closing_ids(renderer: Renderer) -> tuple[int, ...]:
    """Return the ids that the template writes after the last end of turn of a dialogue, often a
    newline."""
    answer: Message = {"role": "assistant", "content": "x"}
    text = renderer.template.render([{"role": "user", "content": "x"}, answer], adds_prompt=False)
    if renderer.turn_ends.is_by_reply:
        return ()
    return tuple(renderer.encode(text[renderer.last_end(text) :])[1:])


def _transcript(
    ids: list[int], mask: list[bool], num_prompt: int, images: tuple[ImageRef, ...]
) -> Transcript:
    return Transcript(token_ids=tuple(ids), mask=tuple(mask), num_prompt=num_prompt, images=images)
