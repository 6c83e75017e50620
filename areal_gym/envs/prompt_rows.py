"""Rows of prompts: which column is the prompt, and the task that a row stands for."""

from __future__ import annotations

import datetime
import decimal
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from areal_gym.errors import DataError, choices
from areal_gym.images import ImageLimits
from areal_gym.images.row_images import (
    hashes,
    image_column,
    read_images,
    require_no_marks,
    with_images,
    with_read_parts,
)
from areal_gym.rewards.base import SAMPLE_NAMES
from areal_gym.tasks import Draft, SourceRow, key_of_text
from areal_gym.types import Message, readable
from areal_gym.utils.markup import short

PROMPT_COLUMNS = ("prompt", "messages", "question")
"""Where the prompt is looked for, in this order, if its column is not named."""
_ROLES = ("system", "user", "assistant", "tool")
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, Path)


@cache  # equal arguments give one function, by which tasks that are read are found again
def drafts(
    column: str | None, required: tuple[tuple[str, str], ...], limits: ImageLimits
) -> Callable[[SourceRow], Draft]:
    """Return a function that makes a task of a row, whose data are all columns.

    `column` names the prompt; `required` has the columns that rewards need, and whose they are;
    `limits` are those of pictures, the process's own: with others, the rows are read anew.
    The function raises a DataError that names the row if one is missing.
    """

    def make_draft(row: SourceRow) -> Draft:
        prompt = prompt_column(row.data, column)
        if prompt is None:
            wanted = [column] if column else PROMPT_COLUMNS
            raise DataError(
                f"{row.where}: no prompt: there is no field {' or '.join(map(repr, wanted))}",
                hints=[
                    *choices(column or "prompt", row.data),
                    "say which it is: env.kwargs.prompt=COLUMN",
                ],
            )
        for name, reward in required:
            if name not in row.data:
                raise DataError(
                    f"{row.where}: no field {name!r}, which the reward {reward!r} needs",
                    hints=[
                        *choices(name, row.data),
                        f"besides columns, a reward may ask for: {', '.join(SAMPLE_NAMES)}",
                    ],
                )
        try:
            given, shown = dict(row.data), image_column(row.data)
            folder = Path(row.where.rpartition(", ")[0]).parent
            if shown is not None and shown != prompt:
                given[shown] = read_images(given[shown], folder, shown)
            given[prompt] = with_read_parts(given[prompt], folder, prompt)
            data = {name: plain_value(value) for name, value in given.items()}
            messages = row_messages(data, prompt)
        except ValueError as error:
            raise DataError(f"{row.where}: {error}") from None
        text = "\n".join(f"{m['role']}: {readable(m['content'])}" for m in messages)
        split = data.get("split")
        text = "\n".join((text, *hashes(messages)))
        return Draft(key_of_text(text), data, split if split in ("train", "test") else None)

    return make_draft


def row_messages(data: Mapping[str, Any], prompt: str) -> list[Message]:
    """Return the messages of a row's prompt with the row's pictures in their places.

    Raises:
        ValueError: the prompt is neither a text nor messages, or does not fit the pictures.
    """
    shown = image_column(data)
    images = [] if shown in (None, prompt) else read_images(data[str(shown)], Path())
    messages = messages_of(data[prompt])
    if not images:
        require_no_marks(data, messages)
    return with_images(messages, images)


def prompt_column(row: Mapping[str, Any], column: str | None) -> str | None:
    """Return the name of the column that holds the prompt; None if the row has none."""
    names = PROMPT_COLUMNS if column is None else (column,)
    return next((name for name in names if row.get(name) is not None), None)


def messages_of(prompt: Any) -> list[Message]:
    """Return the messages of a prompt: a text, or a dialogue up to where the policy goes on.

    Replies of an assistant at the end are left out: the policy is to write them.

    Raises:
        ValueError: it is neither; the text says why.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence):
        raise ValueError(f"the prompt is {short(repr(prompt), 60)}; a text or messages are needed")
    messages = [_message(message, number) for number, message in enumerate(prompt, start=1)]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError("the prompt has no message of a user")
    return messages


def _message(given: Any, number: int) -> Message:
    which = f"message {number} of the prompt"
    if not isinstance(given, Mapping):
        raise ValueError(f"{which} is {short(repr(given), 60)}, not {{role, content}}")
    role, content = given.get("role"), given.get("content")
    if role == "developer":  # OpenAI's newer name
        role = "system"
    if role not in _ROLES:
        raise ValueError(f"{which} has the role {role!r}; there is: {', '.join(_ROLES)}")
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        kinds = {str(part.get("type")) for part in content}
        if unknown := kinds - {"text", "image"}:
            raise ValueError(
                f"{which} has parts of type {', '.join(sorted(unknown))}: text and image are read"
            )
        if kinds == {"text"}:
            content = "".join(str(part.get("text", "")) for part in content)
        else:
            content = [_part(part) for part in content]
    if content is None and given.get("tool_calls"):
        content = ""
    if not isinstance(content, str) and not (isinstance(content, list) and content):
        raise ValueError(f"the content of {which} is {short(repr(content), 60)}, not a text")
    message = {key: given[key] for key in _MESSAGE_KEYS if given.get(key) is not None}
    return {**message, "role": role, "content": content}  # type: ignore[typeddict-item]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    # A part without a hash is a mark of the row's next picture.
    if part["type"] == "text":
        return {"type": "text", "text": str(part.get("text", ""))}
    return dict(part) if "sha256" in part else {"type": "image"}


def plain_value(value: Any) -> Any:
    """Return a value as JSON knows it, for tasks are recorded; missing numbers are None.

    Raises:
        ValueError: it has no such form, like an image.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain_value(value.tolist())
    if isinstance(value, _AS_TEXT):
        return str(value)
    raise ValueError(
        f"a {type(value).__name__} cannot be recorded; leave its column out, or make it text"
    )
