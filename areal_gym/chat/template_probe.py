"""Probes of chat templates: renders generated dialogues to see how a template behaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from areal_gym.chat.message_style import STYLES, MessageStyle
from areal_gym.chat.template import BREAK, ChatTemplate, ToolSchemas
from areal_gym.chat.tool_call_formats import DIALECTS, END_THINK, THINK, parse_assistant
from areal_gym.chat.vision import Vision
from areal_gym.errors import ConfigError
from areal_gym.types import ImagePart, Message, TextPart, ToolCall, text_of

# Letters only, so that no template strips, splits or escapes it.
SENTINEL = "ArealGymSentinel"
_TEXTS = ("Seven.", "x = {1: '2'}\n\nNaïve 数学 🙂 end", "a  b\tc <b>&amp;</b>")


WITH_IMAGE = "+image"
"""Ends a role, in the shape of a reply, whose message has pictures."""
_PICTURE: ImagePart = {
    "type": "image",
    "sha256": "0" * 64,
    "width": 64,
    "height": 64,
    "media_type": "image/png",
}


class ProbedRenderer(Protocol):
    """The part of a renderer that probes use."""

    template: ChatTemplate
    vision: Vision | None
    knows_tool_role: bool
    opening: str
    before_answers: str
    end_of_turn: str
    end_of_turn_id: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text."""

    def render(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> str:
        """Return the text of a whole dialogue."""

    def bridge_text(self, reply: Sequence[Message]) -> str:
        """Return the text between an assistant's text and its next turn."""

    def end_in(self, text: str, start: int = 0) -> int:
        """Return where the first end of a turn begins in `text`; -1 without one."""


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
    return {"role": "tool", "name": "python", "tool_call_id": f"call{index:05d}", "content": text}


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


def image_roles(renderer: ProbedRenderer) -> frozenset[str]:
    """Return the roles in whose messages the template writes each picture, and writes it once.

    Results of tools are users' messages for a template that knows no tools.
    """
    if renderer.vision is None:
        return frozenset()
    mark = renderer.vision.mark
    shown: list[TextPart | ImagePart] = [{"type": "text", "text": SENTINEL}, _PICTURE]
    template, roles = renderer.template, set()
    for role in ("system", "user", "tool"):
        asked = first_messages(False)
        if role == "system":
            dialogue: list[Message] = [{"role": "system", "content": shown * 2}, *asked]
        elif role == "user":
            dialogue = [{"role": "user", "content": shown * 2}]
        else:
            answer: Message = {**_tool_answer("7"), "content": shown * 2}
            has_call = accepts_calls(template, [_tool_answer("7")])
            dialogue = [*asked, reference_answer([answer], has_call=has_call), answer]
        try:
            text = template.render(dialogue)
        except ConfigError:
            continue
        # After the calls of a tool, whose sentinel is another one.
        if text.count(mark) == 2 and text.rpartition(mark)[0].count(SENTINEL) >= 2:
            roles.add(role)
    if not renderer.knows_tool_role and "user" in roles:
        roles.add("tool")
    return frozenset(roles)


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
    asked = first_messages(False)
    answer: Message = {"role": "assistant", "content": "Yes.", "reasoning_content": SENTINEL}
    newest = renderer.template.render([*asked, answer], adds_prompt=False)
    if END_THINK not in renderer.template.source and SENTINEL not in newest:
        return False
    return SENTINEL not in renderer.render([*asked, answer, *asked])


def find_dialect(renderer: ProbedRenderer) -> str | None:
    """Return the dialect that reads back the template's calls; None if it writes none.

    The template's style is set to the one in which they are read back.
    """
    for is_exact in (True, False):
        for style in STYLES:
            renderer.template.style = style
            if (dialect := _dialect_of(renderer, is_exact)) is not None:
                if _refuses_thought_and_prose(renderer.template):
                    renderer.template.style = replace(style, is_one_text=True)
                return dialect
    renderer.template.style = STYLES[0]
    return None


def _dialect_of(renderer: ProbedRenderer, is_exact: bool) -> str | None:
    """Return the dialect of calls in the template's present style.

    With `is_exact` the whole turn, after its header, must be the call.
    """
    answer = _tool_answer("7")
    if not accepts_calls(renderer.template, [answer]):
        return None
    asked = first_messages(False)
    asking = reference_answer([answer], has_call=True)
    try:
        text = renderer.template.render([*asked, asking], adds_prompt=False)
    except ConfigError:  # calls are refused without their results
        text = renderer.template.render([*asked, asking, answer])
        is_alone = False
    else:
        is_alone = True
    header = renderer.template.render(asked).removesuffix(renderer.opening)
    head = renderer.template.render(asked, adds_prompt=False)
    has_header = text.startswith(header)
    turn_text = text[len(header if has_header else head) :].replace(BREAK, "")
    if (end := renderer.end_in(turn_text)) >= 0:
        after = turn_text[end + 1 :]
        turn_text = turn_text[:end]
        if is_alone and is_exact and renderer.end_of_turn in after:
            return None  # DeepSeek's templates write an empty turn after the call
    wanted = asking["tool_calls"][0]["function"]
    # The header of the turn may come before the call. No dialect minds what comes before it but
    # Llama's, whose calls are the whole text.
    for start in (0,) if is_exact else (0, max(turn_text.rfind('{"name"'), 0)):
        for dialect in DIALECTS:
            message = parse_assistant(turn_text[start:], dialect)
            is_read = [call["function"] for call in message.get("tool_calls", [])] == [wanted]
            if is_read and not (is_exact and text_of(message["content"]).strip()):
                return dialect
    return None


def keeps_prose_as_text(template: ChatTemplate) -> bool:
    """Return whether a turn of prose and calls must be written as text (DeepSeek V3, R1).

    Such a template writes prose or calls, or both in another order; it takes the results of calls
    after a turn of text.
    """
    asked = first_messages(False)
    answer = _tool_answer("7")
    asking = reference_answer([answer], has_call=True)
    try:
        text = template.render([*asked, {**asking, "content": "ArealGymProse"}, answer])
        template.render([*asked, {"role": "assistant", "content": SENTINEL}, answer])
    except ConfigError:
        return False
    return not 0 <= text.find("ArealGymProse") < text.find(SENTINEL)


def _refuses_thought_and_prose(template: ChatTemplate) -> bool:
    asking = reference_answer([_tool_answer("7")], has_call=True)
    try:
        template.render(
            [*first_messages(False), {**asking, "content": "A", "reasoning_content": "B"}]
        )
    except ConfigError:
        return accepts_calls(template, [_tool_answer("7")])
    return False


class TurnEnds(NamedTuple):
    """The tokens that end an assistant's turns, by kind of turn."""

    answer: str
    """Ends an answer that a user's message follows; it is the newest message."""
    call: str
    """Ends a turn that calls a tool."""
    is_inner: bool
    """Whether the end of turns in history ends thoughts, too (gpt-oss); sampling then goes on."""
    is_by_reply: bool
    """Whether turns have no end but the next message's header (GLM)."""


def find_turn_ends(renderer: ProbedRenderer, control_tokens: Sequence[str]) -> TurnEnds:
    """Return what ends turns, read off their texts."""
    asked = first_messages(False)
    usual = renderer.end_of_turn
    plain: Message = {"role": "assistant", "content": SENTINEL}
    before_tools = _after_sentinel(renderer.template, [*asked, plain, _tool_answer("7")], True)
    starts = (token for token in control_tokens if before_tools.startswith(token))
    by_reply = max(starts, key=len, default="")
    written = before_tools[: -len(renderer.opening) or None]
    if by_reply and by_reply != usual and usual not in written:
        return TurnEnds(usual, by_reply, is_inner=False, is_by_reply=True)
    thought: Message = {**plain, "reasoning_content": "Hm."}
    prompt = renderer.template.render(asked)
    newest = renderer.template.render([*asked, thought], adds_prompt=False)
    spoken = newest.removeprefix(prompt.removesuffix(renderer.opening)).partition(SENTINEL)[0]
    is_inner = "Hm." in spoken and usual in spoken.partition("Hm.")[2]
    call = reference_answer([_tool_answer("7")], has_call=True)
    ends = []
    for message in (plain, call):
        tail = _after_sentinel(renderer.template, [*asked, message], False)
        last = next((t for t in control_tokens if tail.rstrip().endswith(t)), usual)
        ends.append(
            usual if usual in tail or not (is_inner or renderer.end_in(tail) >= 0) else last
        )
    return TurnEnds(ends[0], ends[1], is_inner, is_by_reply=False)


def _after_sentinel(template: ChatTemplate, messages: Sequence[Message], adds_prompt: bool) -> str:
    try:
        text = template.render(messages, adds_prompt=adds_prompt)
    except ConfigError:
        return ""
    return text.rpartition(SENTINEL)[2].replace(BREAK, "")


def require_end_of_turn(renderer: ProbedRenderer) -> None:
    """Raise ConfigError unless a turn ends with one token, which no text contains."""
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

    `shape` has the roles of each reply.
    """
    for first in _TEXTS:
        num_calls = 0
        dialogue = first_messages(has_system, first)
        try:
            text = renderer.render(dialogue, tools).removesuffix(renderer.opening)
            parts: list[tuple[str | None, str]] = []
            for content in _TEXTS:
                reply = _reply(shape, content, num_calls, renderer.template.style)
                num_results = sum(message["role"] == "tool" for message in reply)
                num_calls += num_results
                has_call = num_results > 0 and accepts_calls(renderer.template, reply)
                answer = reference_answer(reply, has_call=has_call)
                if not has_call:
                    answer["content"] = content
                bridge = renderer.bridge_text(reply).removesuffix(renderer.opening)
                parts.append((None if has_call else content, bridge))
                dialogue += [answer, *reply]
            whole = renderer.render(dialogue, tools).removesuffix(renderer.opening)
        except ConfigError as error:
            return str(error)
        if (difference := _difference(renderer, whole, text, parts)) is not None:
            return difference
    return None


def _reply(
    shape: tuple[str, ...], content: str, num_calls: int, style: MessageStyle
) -> list[Message]:
    reply: list[Message] = []
    for kind in shape:
        role = kind.removesuffix(WITH_IMAGE)
        if role == "tool":
            answer = _tool_answer(content, len(reply))
            if style.has_named_ids:  # counted through the whole dialogue
                answer["tool_call_id"] = f"functions.python:{num_calls + len(reply)}"
            reply.append(answer)
        else:
            reply.append({"role": role, "content": content})  # type: ignore[typeddict-item]
        if role != kind:
            reply[-1]["content"] = [_PICTURE, {"type": "text", "text": content}, _PICTURE]
    return reply


def _difference(
    renderer: ProbedRenderer, whole: str, text: str, parts: list[tuple[str | None, str]]
) -> str | None:
    """Compare the bridged turns with the whole dialogue, turn by turn.

    A turn's text is taken from the whole dialogue: calls are in the template's format (their
    content is None), and some templates write a space before the text.
    """
    for content, bridge in parts:
        end = renderer.end_in(whole, len(text))
        spoken = whole[len(text) : end]
        answer = spoken.removeprefix(renderer.before_answers).strip()
        if end < 0 or not whole.startswith(text) or content not in (None, spoken.strip(), answer):
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
