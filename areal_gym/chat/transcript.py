"""Convert a written dialogue to token ids, as if a policy had sampled the assistant's turns.

`Dialogue` is used as in an episode: the assistant's turns are encoded separately from the text
before them, and end with the end of turn. A policy that learns from transcripts therefore sees the
same token sequences in episodes. If the template rewrites its earlier text, the dialogue forks, and
there is a transcript for each branch.
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
    """A branch of a dialogue of T tokens: `token_ids` and `mask`, both of length T."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """True for the assistant's tokens, including the ends of its turns."""
    num_prompt: int
    """The number of tokens before the assistant's first."""
    images: tuple[ImageRef, ...] = ()
    """The images among the tokens."""


def transcribe(
    renderer: Renderer, messages: Sequence[Message], tools: ToolSchemas = (), *, num_given: int = 0
) -> list[Transcript]:
    """Return the branches of a dialogue, usually one, up to the last turn of the assistant.

    Args:
        renderer: the policy's renderer.
        messages: the messages of the dialogue.
        tools: the schemas of the tools.
        num_given: the number of messages, of any role, that belong to the prompt.

    Raises:
        DataError: the assistant has no turn, or the first one, or two in a row.
        ConfigError: the template refuses the messages.
    """
    dialogue = Dialogue(renderer, tools)
    transcripts: list[Transcript] = []
    ids: list[int] = []
    mask: list[bool] = []
    images: tuple[ImageRef, ...] = ()
    num_prompt = 0
    new: list[Message] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < num_given:
            new.append(message)
            continue
        if not new:
            raise DataError(
                "the assistant speaks first"
                if index == 0
                else f"the assistant speaks twice in a row (message {index + 1})"
            )
        prompt = dialogue.prompt(new)
        reply = messages[index + 1] if index + 1 < len(messages) else None
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
    """Return the text, up to the end of turn, that a policy would sample to write this message.

    Calls and thinking are in the template's format, if it has one.

    Raises:
        ConfigError: the template does not write the message after the header of a turn.
    """
    first: list[Message] = [{"role": "user", "content": "x"}]
    template = renderer.template
    if "tool_calls" in message and renderer.written_dialect is None:
        message = plain_tools.as_text(message)
    header = template.render(first).removesuffix(renderer.opening)
    text = template.render([*first, message], adds_prompt=False)
    turn = text.removeprefix(header)
    end = len(turn) if renderer.turn_ends.is_by_reply else renderer.last_end(turn)
    if not text.startswith(header) or end < 0:
        raise ConfigError(
            "the chat template writes an assistant's message in history otherwise than it is asked "
            f"for: {text[:60]!r} does not begin with {header[:60]!r}"
        )
    turn = turn[:end].replace(BREAK, "")
    thought = message.get("reasoning_content", "")
    if thought.strip() not in turn:  # some templates do not write the thoughts of earlier turns
        turn = f"{THINK}\n{thought}\n{END_THINK}\n\n{turn}"
    if turn.startswith(renderer.opening):
        return turn.removeprefix(renderer.opening)
    # The header has opened a thought that this message does not have.
    return turn if END_THINK in renderer.opening else f"\n{END_THINK}\n\n{turn.lstrip()}"


def closing_ids(renderer: Renderer) -> tuple[int, ...]:
    """Return the ids that the template writes after the last end of turn, often a newline."""
    answer: Message = {"role": "assistant", "content": "x"}
    text = renderer.template.render([{"role": "user", "content": "x"}, answer], adds_prompt=False)
    if renderer.turn_ends.is_by_reply:
        return ()
    return tuple(renderer.encode(text[renderer.last_end(text) :])[1:])


def _transcript(
    ids: list[int], mask: list[bool], num_prompt: int, images: tuple[ImageRef, ...]
) -> Transcript:
    return Transcript(token_ids=tuple(ids), mask=tuple(mask), num_prompt=num_prompt, images=images)
