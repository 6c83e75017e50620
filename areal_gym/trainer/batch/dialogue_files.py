"""Reads dialogues and preferences from JSON lines, and encodes them as examples.

    {"messages": [...]}                                     a dialogue
    {"messages": [...], "chosen": ..., "rejected": ...}     a preference
    {"messages": [...], "completion": ..., "label": true}   a labelled answer

Messages have OpenAI's format; the arguments of tool calls may be an object or JSON text, and tool
results have the role "tool". `chosen`, `rejected` and `completion` are a text, a message or a list
of messages; with them, `prompt` (a text, or messages) may replace `messages`. A row may have
`tools` and a column `images` for its messages, as in `areal_gym.images.row_images`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_gym.chat import Renderer, transcribe
from areal_gym.chat.template import ToolSchemas
from areal_gym.chat.transcript import closing_ids
from areal_gym.errors import DataError, NothingToDoError, did_you_mean
from areal_gym.images.row_images import image_column, read_images, with_images, with_read_parts
from areal_gym.message_types import is_content
from areal_gym.trainer.batch.examples import Example, TokenRow
from areal_gym.types import Message, ToolCall
from areal_gym.utils.files import path_hints

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A dialogue from which the assistant's messages are learned."""

    messages: Sequence[Message]
    tools: ToolSchemas = ()
    where: str = "a dialogue"
    """The file and line, for errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference(Written):
    """Two continuations of a dialogue, the better one first."""

    chosen: Sequence[Message]
    rejected: Sequence[Message]
    where: str = "a preference"


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled(Written):
    """A continuation of a dialogue with a label: good or bad."""

    completion: Sequence[Message]
    is_desirable: bool
    where: str = "a labelled answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Encoded examples, and the number of those that were dropped because they are too long."""

    examples: list[Example]
    num_too_long: int

    def __len__(self) -> int:
        return len(self.examples)


def labelled(preference: Preference) -> list[Labelled]:
    """Return the two answers of a preference as labelled ones: the chosen one is good."""
    sides = ((preference.chosen, True), (preference.rejected, False))
    return [
        Labelled(
            messages=preference.messages,
            completion=side,
            is_desirable=is_desirable,
            tools=preference.tools,
            where=preference.where,
        )
        for side, is_desirable in sides
    ]


def read_file(path: Path, *, is_preference: bool, is_labelled: bool = False) -> list[Written]:
    """Read all lines that are not blank; `is_labelled` also splits preferences into two answers.

    Raises:
        DataError: the file is missing or a line is broken; the message names file and line.
        NothingToDoError: the file is empty.
    """
    items: list[Written] = []
    for where, raw_row in _rows(path):
        row = _with_read_parts(raw_row, path.parent, where)
        tools = row.get("tools") or ()
        if not isinstance(tools, list | tuple) or not all(isinstance(t, dict) for t in tools):
            raise DataError(f"{where}: tools is {tools!r:.80}; a list of schemas is needed")
        start = "prompt" if "prompt" in row and "messages" not in row else "messages"
        if is_labelled and "chosen" not in row:
            label = row.get("label")
            if not isinstance(label, bool):
                raise DataError(f"{where}: label is {label!r:.80}; true or false is needed")
            parts = {"messages": start, "completion": "completion"}
            sides = {key: _messages(row, name, where) for key, name in parts.items()}
            sides["messages"] = _with_pictures(sides["messages"], row, path.parent, where)
            items.append(Labelled(**sides, is_desirable=label, tools=tools, where=where))
        elif is_preference or is_labelled:
            names = {"messages": start, "chosen": "chosen", "rejected": "rejected"}
            sides = {key: _messages(row, name, where) for key, name in names.items()}
            sides["messages"] = _with_pictures(sides["messages"], row, path.parent, where)
            pair = Preference(**sides, tools=tools, where=where)
            items += labelled(pair) if is_labelled else [pair]
        elif "chosen" in row:
            raise DataError(
                f"{where}: it has `chosen`, so it is a preference, not a dialogue",
                hints=["learn from preferences with --objective dpo or --objective rm"],
            )
        else:
            messages = _messages(row, "messages", where)
            messages = _with_pictures(messages, row, path.parent, where)
            items.append(Written(messages=messages, tools=tools, where=where))
    if not items:
        raise NothingToDoError(f"{path} has no rows")
    return items


def encode(
    data: Sequence[Written], renderer: Renderer, *, max_context: int, has_closing: bool = False
) -> Encoded:
    """Encode dialogues as examples.

    Each branch of a `Written` is an example of one row, and a `Preference` is an example of two. A
    `Labelled` also has two rows: the second is its prompt with the answer to another prompt.
    Examples longer than `max_context` are dropped and counted, because truncated ones would teach
    the policy to end early.

    Args:
        data: dialogues, preferences or labelled answers.
        renderer: turns messages into token ids.
        max_context: the most tokens of a row.
        has_closing: whether rows end with the template's text after the last turn, as those of a
            reward model do.

    Raises:
        DataError: an assistant message is empty, or a compared continuation branches.
        ConfigError: the template refuses a dialogue.
    """
    tail = closing_ids(renderer) if has_closing else ()
    examples: list[Example] = []
    num_too_long = 0
    for item in data:
        encoded: list[Example]
        try:
            if isinstance(item, Preference):
                encoded = [_pair(item, renderer, tail)]
            elif isinstance(item, Labelled):
                row = _continued(item, item.completion, renderer, tail)
                encoded = [(replace(row, is_desirable=item.is_desirable),)]
            else:
                branches = transcribe(renderer, item.messages, item.tools)
                encoded = [
                    (TokenRow(token_ids=b.token_ids, mask=b.mask, images=b.images),)
                    for b in branches
                ]
        except DataError as error:
            raise DataError(f"{item.where}: {error}", hints=error.hints) from None
        for example in encoded:
            if max(len(row.token_ids) for row in example) > max_context:
                num_too_long += 1
            else:
                examples.append(example)
    if any(isinstance(item, Labelled) for item in data):
        examples = _with_other_answers([row for (row,) in examples], max_context)
    return Encoded(examples=examples, num_too_long=num_too_long)


def _pair(item: Preference, renderer: Renderer, tail: tuple[int, ...]) -> Example:
    sides = (item.chosen, item.rejected)
    rows = tuple(_continued(item, side, renderer, tail) for side in sides)
    if rows[0].token_ids == rows[1].token_ids:
        raise DataError("chosen and rejected are the same")
    return rows


def _continued(
    item: Written, side: Sequence[Message], renderer: Renderer, tail: tuple[int, ...]
) -> TokenRow:
    """Encode a dialogue with a continuation, from which alone the policy learns."""
    branches = transcribe(
        renderer, [*item.messages, *side], item.tools, num_given=len(item.messages)
    )
    if len(branches) > 1:
        raise DataError(
            "the chat template rewrites its earlier text after the first answer, so that the "
            "compared texts are not single sequences of tokens",
            hints=["give one assistant message each as chosen and rejected"],
        )
    row = branches[0]
    return TokenRow(
        token_ids=row.token_ids + tail,
        mask=row.mask + (False,) * len(tail),
        num_shared=row.num_prompt,
        images=row.images,
    )


def _with_other_answers(rows: Sequence[TokenRow], max_context: int) -> list[Example]:
    """Pair each row with its prompt and another prompt's answer, truncated at `max_context`."""
    examples: list[Example] = []
    for i, row in enumerate(rows):
        prompt = row.token_ids[: row.num_shared]
        later = (rows[(i + k) % len(rows)] for k in range(1, len(rows) + 1))
        other = next((o for o in later if o.prompt != row.prompt), row)
        answer, mask = other.token_ids[other.num_shared :], other.mask[other.num_shared :]
        mismatched = TokenRow(
            token_ids=(*prompt, *answer)[:max_context],
            mask=((False,) * len(prompt) + tuple(mask))[:max_context],
            num_shared=row.num_shared,
            images=tuple(image for image in row.images if image.start < row.num_shared),
        )
        examples.append((row, mismatched))
    return examples


# ---- JSON --------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hints=path_hints(path)) from None
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: a row is an object, not {type(row).__name__}")
        yield where, row


def _messages(row: Mapping[str, Any], name: str, where: str) -> list[Message]:
    """Parse a field: a list of messages, one message, or a plain text."""
    if name not in row:
        near = did_you_mean(name, row) or f"it has: {', '.join(row) or 'nothing'}"
        raise DataError(f"{where}: no field {name!r}", hints=[near])
    value = row[name]
    if isinstance(value, str):
        role = "user" if name in ("messages", "prompt") else "assistant"
        value = {"role": role, "content": value}
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name} is {value!r:.80}; a list of messages is needed")
    return [_message(item, f"{where}: {name}[{place}]") for place, item in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise DataError(f"{where} is {value!r:.80}; a message is an object")
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        near = did_you_mean(str(role), _ROLES) or f"available: {', '.join(_ROLES)}"
        raise DataError(f"{where}: no role {role!r}", hints=[near])
    if content is None and value.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(map(_is_part, content)):
        content = [dict(part) for part in content]
    elif not isinstance(content, str):
        raise DataError(
            f"{where}: content is {content!r:.80}; a text is needed, or a list of parts",
            hints=['parts are {"type": "text", "text": ...} and {"type": "image"}'],
        )
    message: Message = {"role": role, "content": content}
    if value.get("tool_calls"):
        message["tool_calls"] = [_call(call, where) for call in value["tool_calls"]]
    for name in ("reasoning_content", "tool_call_id", "name"):
        if isinstance(value.get(name), str):
            message[name] = value[name]
    return message


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    is_text = part.get("type") == "text" and isinstance(part.get("text"), str)
    return is_text or part == {"type": "image"} or is_content([part])


def _with_read_parts(row: Mapping[str, Any], folder: Path, where: str) -> Mapping[str, Any]:
    """Return the row with the images in its messages moved to the image store."""
    try:
        fields = {name: row[name] for name in ("prompt", "messages") if name in row}
        read = {name: with_read_parts(value, folder, name) for name, value in fields.items()}
        return {**row, **read}
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def _with_pictures(
    messages: list[Message], row: Mapping[str, Any], folder: Path, where: str
) -> list[Message]:
    """Return the messages with the images of the row's column at their placeholders."""
    column = image_column(row)
    try:
        images = [] if column is None else read_images(row[column], folder, column)
        return with_images(messages, images)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def _call(value: Any, where: str) -> ToolCall:
    try:
        name, arguments = value["function"]["name"], value["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{where}: {value!r:.80} is not a tool call",
            hints=['like {"type": "function", "function": {"name": ..., "arguments": {...}}}'],
        ) from None
    return {
        "id": str(value.get("id", "call00000")),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
