"""Probe chat templates: render generated dialogues to find out how a template behaves."""

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

# The sentinel consists of letters, so that no template strips, splits or escapes it.
SENTINEL = "ArealGymSentinel"
_TEXTS = ("Seven.", "x = {1: '2'}\n\nNaïve 数学 🙂 end", "a  b\tc <b>&amp;</b>")


WITH_IMAGE = "+image"
"""The suffix of a role, in the shape of a reply, if its message has images."""
_IMAGE: ImagePart = {
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
        """Return the position of the first end of a turn in `text`; -1 if there is none."""


def first_messages(has_system: bool, text: str = "Go on.") -> list[Message]:
    """Return the first messages of a reference dialogue."""
    system: list[Message] = [{"role": "system", "content": "Be exact."}] if has_system else []
    return [*system, {"role": "user", "content": text}]


def reference_answer(reply: Sequence[Message], *, has_call: bool) -> Message:
    """Return an assistant's turn before `reply`; the sentinel ends its text or its calls.

    With `has_call`, it has a call for each tool result in `reply`.
    """
    if not has_call:
        return {"role": "assistant", "content": SENTINEL}
    results = [message for message in reply if message["role"] == "tool"]
    return {"role": "assistant", "content": "", "tool_calls": [_call_of(m) for m in results]}


def _call_of(result: Message) -> ToolCall:
    return {
        "id": result.get("tool_call_id", "call00000"),
        "type": "function",
        "function": {"name": result.get("name", "python"), "arguments": {"code": SENTINEL}},
    }


def _tool_result(text: str, index: int = 0) -> Message:
    return {"role": "tool", "name": "python", "tool_call_id": f"call{index:05d}", "content": text}


def accepts_calls(template: ChatTemplate, reply: Sequence[Message]) -> bool:
    """Return whether the template writes the calls whose results are in `reply`."""
    answer = reference_answer(reply, has_call=True)
    try:
        text = template.render([*first_messages(False), answer, *reply])
    except ConfigError:
        return False
    return SENTINEL in text


def knows_tool_role(template: ChatTemplate) -> bool:
    """Return whether the template renders tool results."""
    result = _tool_result(SENTINEL + "A")
    for has_call in (True, False):
        answer = reference_answer([result], has_call=has_call)
        try:
            text = template.render([*first_messages(True), answer, result])
        except ConfigError:
            continue
        if SENTINEL + "A" in text:
            return True
    return False


def image_roles(renderer: ProbedRenderer) -> frozenset[str]:
    """Return the roles in whose messages the template writes each image exactly once.

    Tool results are user messages for a template without tools.
    """
    if renderer.vision is None:
        return frozenset()
    mark = renderer.vision.mark
    parts: list[TextPart | ImagePart] = [{"type": "text", "text": SENTINEL}, _IMAGE]
    template, roles = renderer.template, set()
    for role in ("system", "user", "tool"):
        first = first_messages(False)
        if role == "system":
            dialogue: list[Message] = [{"role": "system", "content": parts * 2}, *first]
        elif role == "user":
            dialogue = [{"role": "user", "content": parts * 2}]
        else:
            result: Message = {**_tool_result("7"), "content": parts * 2}
            has_call = accepts_calls(template, [_tool_result("7")])
            dialogue = [*first, reference_answer([result], has_call=has_call), result]
        try:
            text = template.render(dialogue)
        except ConfigError:
            continue
        # The result of a tool comes after its call, which has a sentinel, too.
        if text.count(mark) == 2 and text.rpartition(mark)[0].count(SENTINEL) >= 2:
            roles.add(role)
    if not renderer.knows_tool_role and "user" in roles:
        roles.add("tool")
    return frozenset(roles)


def thinking_opening(template: ChatTemplate) -> str:
    """Return the header of the assistant's turn from `<think>` on; empty if it has none."""
    first = first_messages(False)
    text, before = template.render(first), template.render(first, adds_prompt=False)
    header = text[len(before) :] if text.startswith(before) else ""
    return header[header.index(THINK) :] if THINK in header else ""


def written_before_answers(renderer: ProbedRenderer) -> str:
    """Return the template's text between the header of an earlier turn and its answer."""
    first = first_messages(False)
    answer: Message = {"role": "assistant", "content": SENTINEL}
    header = renderer.template.render(first).removesuffix(renderer.opening)
    before = renderer.template.render([*first, answer, *first]).partition(SENTINEL)[0]
    return before.removeprefix(header) if before.startswith(header) else ""


def drops_thinking(renderer: ProbedRenderer) -> bool:
    """Return whether the template knows thinking, and leaves out that of earlier turns."""
    first = first_messages(False)
    answer: Message = {"role": "assistant", "content": "Yes.", "reasoning_content": SENTINEL}
    newest = renderer.template.render([*first, answer], adds_prompt=False)
    if END_THINK not in renderer.template.source and SENTINEL not in newest:
        return False
    return SENTINEL not in renderer.render([*first, answer, *first])


def find_dialect(renderer: ProbedRenderer) -> str | None:
    """Return the dialect that parses the calls that the template writes; None if it writes none.

    The template's style is set to the one with which they are parsed correctly.
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
    """Return the dialect of calls in the template's current style; None if none parses them.

    With `is_exact`, the whole turn after its header must be the call.
    """
    result = _tool_result("7")
    if not accepts_calls(renderer.template, [result]):
        return None
    first = first_messages(False)
    answer = reference_answer([result], has_call=True)
    try:
        text = renderer.template.render([*first, answer], adds_prompt=False)
    except ConfigError:  # calls are refused without their results
        text = renderer.template.render([*first, answer, result])
        is_alone = False
    else:
        is_alone = True
    header = renderer.template.render(first).removesuffix(renderer.opening)
    head = renderer.template.render(first, adds_prompt=False)
    has_header = text.startswith(header)
    turn_text = text[len(header if has_header else head) :].replace(BREAK, "")
    if (end := renderer.end_in(turn_text)) >= 0:
        after = turn_text[end + 1 :]
        turn_text = turn_text[:end]
        if is_alone and is_exact and renderer.end_of_turn in after:
            return None  # DeepSeek's templates write an empty turn after the call
    expected = answer["tool_calls"][0]["function"]
    # The header of the turn may come before the call. Only Llama's dialect does not allow that,
    # because its calls are the whole text.
    for start in (0,) if is_exact else (0, max(turn_text.rfind('{"name"'), 0)):
        for dialect in DIALECTS:
            message = parse_assistant(turn_text[start:], dialect)
            is_parsed = [call["function"] for call in message.get("tool_calls", [])] == [expected]
            if is_parsed and not (is_exact and text_of(message["content"]).strip()):
                return dialect
    return None


def keeps_prose_as_text(template: ChatTemplate) -> bool:
    """Return whether a turn of prose and calls must be passed as text (DeepSeek V3, R1).

    Such a template writes either prose or calls, or both in another order, and it accepts tool
    results after a turn of text.
    """
    first = first_messages(False)
    result = _tool_result("7")
    answer = reference_answer([result], has_call=True)
    try:
        text = template.render([*first, {**answer, "content": "ArealGymProse"}, result])
        template.render([*first, {"role": "assistant", "content": SENTINEL}, result])
    except ConfigError:
        return False
    return not 0 <= text.find("ArealGymProse") < text.find(SENTINEL)


def _refuses_thought_and_prose(template: ChatTemplate) -> bool:
    answer = reference_answer([_tool_result("7")], has_call=True)
    try:
        template.render(
            [*first_messages(False), {**answer, "content": "A", "reasoning_content": "B"}]
        )
    except ConfigError:
        return accepts_calls(template, [_tool_result("7")])
    return False


class TurnEnds(NamedTuple):
    """The tokens that end an assistant's turns, by kind of turn."""

    answer: str
    """The end of an answer that is the newest message, before a user message."""
    call: str
    """The end of a turn that calls a tool."""
    is_inner: bool
    """Whether the end of earlier turns also ends thoughts (gpt-oss), where sampling continues."""
    is_by_reply: bool
    """Whether only the header of the next message ends a turn (GLM)."""


def find_turn_ends(renderer: ProbedRenderer, control_tokens: Sequence[str]) -> TurnEnds:
    """Return the ends of turns, found in the texts that the template writes for them."""
    first = first_messages(False)
    usual = renderer.end_of_turn
    plain: Message = {"role": "assistant", "content": SENTINEL}
    before_tools = _after_sentinel(renderer.template, [*first, plain, _tool_result("7")], True)
    starts = (token for token in control_tokens if before_tools.startswith(token))
    by_reply = max(starts, key=len, default="")
    written = before_tools[: -len(renderer.opening) or None]
    if by_reply and by_reply != usual and usual not in written:
        return TurnEnds(usual, by_reply, is_inner=False, is_by_reply=True)
    thought: Message = {**plain, "reasoning_content": "Hm."}
    prompt = renderer.template.render(first)
    newest = renderer.template.render([*first, thought], adds_prompt=False)
    turn = newest.removeprefix(prompt.removesuffix(renderer.opening)).partition(SENTINEL)[0]
    is_inner = "Hm." in turn and usual in turn.partition("Hm.")[2]
    call = reference_answer([_tool_result("7")], has_call=True)
    ends = []
    for message in (plain, call):
        tail = _after_sentinel(renderer.template, [*first, message], False)
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
    """Raise ConfigError unless a turn ends with a single token that no text contains."""
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
    """Return the difference between bridged turns and the whole dialogue; None if they are equal.

    `shape` has the roles of the messages of each reply.
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
    for marked_role in shape:
        role = marked_role.removesuffix(WITH_IMAGE)
        if role == "tool":
            result = _tool_result(content, len(reply))
            if style.has_named_ids:  # numbered through the whole dialogue
                result["tool_call_id"] = f"functions.python:{num_calls + len(reply)}"
            reply.append(result)
        else:
            reply.append({"role": role, "content": content})  # type: ignore[typeddict-item]
        if role != marked_role:
            reply[-1]["content"] = [_IMAGE, {"type": "text", "text": content}, _IMAGE]
    return reply


def _difference(
    renderer: ProbedRenderer, whole: str, text: str, parts: list[tuple[str | None, str]]
) -> str | None:
    """Compare the bridged turns with the whole dialogue, turn by turn.

    A turn's text is taken from the whole dialogue, because calls are in the template's format
    (their content is None) and some templates write a space before the text.
    """
    for content, bridge in parts:
        end = renderer.end_in(whole, len(text))
        turn = whole[len(text) : end]
        answer = turn.removeprefix(renderer.before_answers).strip()
        if end < 0 or not whole.startswith(text) or content not in (None, turn.strip(), answer):
            turn = content or ""
        if renderer.encode(turn + bridge) != renderer.encode(turn) + renderer.encode(bridge):
            return f"the end of a turn is not encoded apart from what comes before: {bridge[:40]!r}"
        text += turn + bridge
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
