"""Probes of chat templates: renders generated dialogues to see how a template behaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from areal_gym.chat.template import BREAK, ChatTemplate, ToolSchemas
from areal_gym.chat.tool_call_formats import DIALECTS, END_THINK, THINK, parse_assistant
from areal_gym.errors import ConfigError
from areal_gym.types import Message, ToolCall

# Letters only, so that no template strips, splits or escapes it.
SENTINEL = "ArealGymSentinel"
_TEXTS = ("Seven.", "x = {1: '2'}\n\nNaïve 数学 🙂 end", "a  b\tc <b>&amp;</b>")


class ProbedRenderer(Protocol):
    """The part of a renderer that probes use."""

    template: ChatTemplate
    opening: str
    end_of_turn: str
    end_of_turn_id: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text."""
        ...

    def render(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> str:
        """Return the text of a whole dialogue."""
        ...

    def bridge_text(self, reply: Sequence[Message]) -> str:
        """Return the text between an assistant's text and its next turn."""
        ...


def first_messages(has_system: bool, text: str = "Go on.") -> list[Message]:
    """Return the beginning of a reference dialogue."""
    system: list[Message] = [{"role": "system", "content": "Be exact."}] if has_system else []
    return [*system, {"role": "user", "content": text}]


def reference_answer(reply: Sequence[Message], *, has_call: bool) -> Message:
    """Return an assistant's turn that `reply` answers; the sentinel ends its text."""
    if not has_call:
        return {"role": "assistant", "content": SENTINEL}
    asked = [message for message in reply if message["role"] == "tool"]
    return {"role": "assistant", "content": "", "tool_calls": [_call_of(m) for m in asked]}


def _call_of(answer: Message) -> ToolCall:
    return {
        "id": answer.get("tool_call_id", "call00000"),
        "type": "function",
        "function": {"name": answer.get("name", "python"), "arguments": {"code": SENTINEL}},
    }


def _tool_answer(text: str, index: int = 0) -> Message:
    return {
        "role": "tool",
        "name": "python",
        "tool_call_id": f"call{index:05d}",
        "content": text,
    }


def accepts_calls(template: ChatTemplate, reply: Sequence[Message]) -> bool:
    """Return whether the template writes the calls that `reply` answers."""
    answer = reference_answer(reply, has_call=True)
    try:
        text = template.render([*first_messages(False), answer, *reply])
    except ConfigError:
        return False
    return SENTINEL in text


def knows_tool_role(template: ChatTemplate) -> bool:
    """Return whether the template renders tool results."""
    answer = _tool_answer(SENTINEL + "A")
    for has_call in (True, False):
        asking = reference_answer([answer], has_call=has_call)
        try:
            text = template.render([*first_messages(True), asking, answer])
        except ConfigError:
            continue
        if SENTINEL + "A" in text:
            return True
    return False


def thinking_opening(template: ChatTemplate) -> str:
    """Return the header of the assistant's turn from `<think>` on; empty without it."""
    asked = first_messages(False)
    text, before = template.render(asked), template.render(asked, adds_prompt=False)
    header = text[len(before) :] if text.startswith(before) else ""
    return header[header.index(THINK) :] if THINK in header else ""


def written_before_answers(renderer: ProbedRenderer) -> str:
    """Return the template's text in history between the header of a turn and the answer."""
    asked = first_messages(False)
    answer: Message = {"role": "assistant", "content": SENTINEL}
    header = renderer.template.render(asked).removesuffix(renderer.opening)
    before = renderer.template.render([*asked, answer, *asked]).partition(SENTINEL)[0]
    return before.removeprefix(header) if before.startswith(header) else ""


def drops_thinking(renderer: ProbedRenderer) -> bool:
    """Return whether the template leaves out the thinking of earlier turns, by design."""
    if END_THINK not in renderer.template.source:
        return False
    answer: Message = {"role": "assistant", "content": "Yes.", "reasoning_content": SENTINEL}
    return SENTINEL not in renderer.render([*first_messages(False), answer, *first_messages(False)])


def find_dialect(renderer: ProbedRenderer) -> str | None:
    """Return the dialect that reads back the template's calls; None if it writes none."""
    answer = _tool_answer("7")
    if not accepts_calls(renderer.template, [answer]):
        return None
    asking = reference_answer([answer], has_call=True)
    head = renderer.template.render(first_messages(False), adds_prompt=False)
    text = renderer.template.render([*first_messages(False), asking, answer])
    turn_text = text[len(head) :].replace(BREAK, "").partition(renderer.end_of_turn)[0]
    wanted = asking["tool_calls"][0]["function"]
    # The header of the turn comes before the call. No dialect minds what comes before it but
    # Llama's, whose calls are the whole text.
    for start in (0, max(turn_text.rfind('{"name"'), 0)):
        for dialect in DIALECTS:
            message = parse_assistant(turn_text[start:], dialect)
            if [call["function"] for call in message.get("tool_calls", [])] == [wanted]:
                return dialect
    return None


def require_end_of_turn(renderer: ProbedRenderer) -> None:
    """Check that a turn ends with one token, which no text contains.

    Raises:
        ConfigError: a turn ends otherwise.
    """
    written = renderer.bridge_text([{"role": "user", "content": "x"}])
    bridge = renderer.encode(written)
    for text in _TEXTS:
        answer = renderer.encode(text)
        whole = renderer.encode(text + renderer.end_of_turn)
        if (
            not renderer.end_of_turn.strip()
            or renderer.end_of_turn_id in answer
            or whole != [*answer, renderer.end_of_turn_id]
            or bridge[0] != renderer.end_of_turn_id
        ):
            raise ConfigError(
                "the chat template does not end an assistant's turn with one token of its own: "
                f"after the text comes {written[:40]!r}",
                hints=["multi-turn training needs a template with an end-of-turn token"],
            )


def find_difference(
    renderer: ProbedRenderer, has_system: bool, tools: ToolSchemas, shape: tuple[str, ...]
) -> str | None:
    """Return how bridged turns differ from the whole dialogue; None if they are equal.

    Args:
        renderer: the renderer of the probed template.
        has_system: whether the dialogue begins with a system message.
        tools: the tools that the policy may call.
        shape: the roles of each reply.
    """
    for first in _TEXTS:
        dialogue = first_messages(has_system, first)
        try:
            text = renderer.render(dialogue, tools).removesuffix(renderer.opening)
            parts: list[tuple[str | None, str]] = []
            for content in _TEXTS:
                reply = _reply(shape, content)
                has_call = "tool" in shape and accepts_calls(renderer.template, reply)
                answer = reference_answer(reply, has_call=has_call)
                if not has_call:
                    answer["content"] = content
                bridge = renderer.bridge_text(reply).removesuffix(renderer.opening)
                parts.append((None if has_call else content, bridge))
                dialogue += [answer, *reply]
            whole = renderer.render(dialogue, tools).removesuffix(renderer.opening)
        except ConfigError as error:
            return str(error)
        difference = _difference(renderer, whole, text, parts)
        if difference is not None:
            return difference
    return None


def _reply(shape: tuple[str, ...], content: str) -> list[Message]:
    num_tools = 0
    reply: list[Message] = []
    for role in shape:
        if role == "tool":
            reply.append(_tool_answer(content, num_tools))
            num_tools += 1
        else:
            reply.append({"role": role, "content": content})  # type: ignore[typeddict-item]
    return reply


def _difference(
    renderer: ProbedRenderer, whole: str, text: str, parts: list[tuple[str | None, str]]
) -> str | None:
    """Compare the bridged turns with the whole dialogue, turn by turn.

    A turn's text is taken from the whole dialogue: calls are in the template's format (their
    content is None), and some templates write a space before the text.
    """
    for content, bridge in parts:
        end = whole.find(renderer.end_of_turn, len(text))
        spoken = whole[len(text) : end]
        if end < 0 or not whole.startswith(text) or content not in (None, spoken.strip()):
            spoken = content or ""
        if renderer.encode(spoken + bridge) != renderer.encode(spoken) + renderer.encode(bridge):
            return f"the end of a turn is not encoded apart from what comes before: {bridge[:40]!r}"
        text += spoken + bridge
    if whole == text:
        return None
    start = next(
        (i for i, (a, b) in enumerate(zip(whole, text, strict=False)) if a != b),
        min(len(whole), len(text)),
    )
    before, end = whole[max(0, start - 30) : start], start + 30
    return (
        "the chat template rewrites earlier turns: a whole dialogue has "
        f"{whole[start:end]!r} after {before!r}, bridged turns have {text[start:end]!r}"
    )
