"""Pictures in rows of data: the column that has them, and their places in the prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from areal_gym.errors import UsageError
from areal_gym.images.image_store import image_store
from areal_gym.images.reading import read_data_url
from areal_gym.message_types import is_content
from areal_gym.types import Content, ImagePart, Message, TextPart, images_of

IMAGE_COLUMNS = ("images", "image")
"""Where the pictures of a row are looked for, in this order."""
MARK = "<image>"
"""Stands in a prompt for the next picture of the row."""
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
_LARGEST_FILE = 64 * 2**20


def image_column(row: Mapping[str, Any]) -> str | None:
    """Return the name of the column with pictures; None if the row has none."""
    return next((name for name in IMAGE_COLUMNS if _is_picture(row.get(name))), None)


def read_images(value: Any, folder: Path) -> list[ImagePart]:
    """Return the pictures of a column; their bytes are kept in the store of the process.

    Args:
        value: one picture or several: bytes, a path, a Pillow image, a `data:` URL, or an object
            `{"bytes": ..., "path": ...}`, as `datasets.Image` has it in files.
        folder: where paths begin.

    Raises:
        ValueError: a picture cannot be read; the text says why.
    """
    pictures = value if isinstance(value, list | tuple) else [value]
    return [_read(picture, folder, number) for number, picture in enumerate(pictures, start=1)]


def with_images(messages: Sequence[Message], images: Sequence[ImagePart]) -> list[Message]:
    """Return messages in which pictures stand in place of their marks, in order.

    A mark is the text `<image>`, or a part of type "image" without a picture of its own. Without
    any mark the pictures come first in the first message of a user.

    Raises:
        ValueError: there are more or fewer marks than pictures.
    """
    if not images:
        return list(messages)
    num_marks = sum(_num_marks(message) for message in messages)
    if not num_marks:
        users = [place for place, message in enumerate(messages) if message["role"] == "user"]
        first = users[0] if users else 0
        parts = [*images, *_parts(messages[first]["content"])]
        return [
            {**message, "content": parts} if place == first else message
            for place, message in enumerate(messages)
        ]
    if num_marks != len(images):
        raise ValueError(f"the prompt has {num_marks} marks of pictures, the row {len(images)}")
    left = iter(images)
    return [_filled(message, left) for message in messages]


def has_empty_part(message: Message) -> bool:
    """Return whether a message has a part of type "image" without a picture."""
    return any(_is_mark(part) for part in _parts(message["content"]))


def hashes(messages: Sequence[Message]) -> list[str]:
    """Return the hashes of the pictures of messages: rows with other pictures are other rows."""
    return [part["sha256"] for message in messages for part in images_of(message["content"])]


def _is_picture(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_picture, value))
    if isinstance(value, Mapping):
        return value.get("bytes") is not None or value.get("path") is not None or "sha256" in value
    if isinstance(value, str):  # other texts are columns of texts that are called so
        return value.startswith("data:image/") or value.lower().endswith(_ENDINGS)
    return isinstance(value, bytes) or _is_pillow(value)


def _is_pillow(value: Any) -> bool:
    return hasattr(value, "getexif") and hasattr(value, "convert")


def _read(picture: Any, folder: Path, number: int) -> ImagePart:
    if isinstance(picture, Mapping) and "sha256" in picture:  # read before: a task of a record
        return cast(ImagePart, dict(picture))
    try:
        if isinstance(picture, Mapping):
            raw = picture.get("bytes")
            picture = picture.get("path") if raw is None else raw
        if isinstance(picture, str) and picture.startswith("data:"):
            raw, media_type = read_data_url(picture)
            return image_store().add(raw, media_type=media_type)
        if isinstance(picture, str):
            picture = _file(folder / picture)
        if isinstance(picture, bytes) or _is_pillow(picture):
            return image_store().add(picture)
    except (UsageError, OSError) as error:
        raise ValueError(f"picture {number}: {error}") from None
    raise ValueError(f"picture {number} is a {type(picture).__name__}, not bytes, a path or image")


def _file(path: Path) -> bytes:
    if path.stat().st_size > _LARGEST_FILE:
        raise UsageError(f"{path} is too large for a picture")
    return path.read_bytes()


def _parts(content: Content) -> list[TextPart | ImagePart]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _is_mark(part: Mapping[str, Any]) -> bool:
    return part["type"] == "image" and "sha256" not in part


def _num_marks(message: Message) -> int:
    return sum(
        part["text"].count(MARK) if part["type"] == "text" else _is_mark(part)
        for part in _parts(message["content"])
    )


def _filled(message: Message, images: Iterator[ImagePart]) -> Message:
    if not _num_marks(message):
        return message
    parts: list[TextPart | ImagePart] = []
    for part in _parts(message["content"]):
        if part["type"] != "text":
            parts.append(next(images) if _is_mark(part) else part)
            continue
        texts = part["text"].split(MARK)
        for text, image in zip(
            texts, [*itertools.islice(images, len(texts) - 1), None], strict=True
        ):
            if text:
                parts.append({"type": "text", "text": text})
            if image is not None:
                parts.append(image)
    assert is_content(parts)
    return {**message, "content": parts}
