"""Pictures in rows of data: the column that has them, and their places in the prompt.

A picture may also be inside of a part of a message, as OpenAI, transformers and qwen-vl-utils write
it: `{"type": "image_url", "image_url": {"url": "data:..."}}`, `{"type": "image", "path": "a.png"}`.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from areal_gym.errors import UsageError
from areal_gym.images.image_store import image_store
from areal_gym.images.reading import ImageLimits, decode_base64, encode_png, read_data_url
from areal_gym.message_types import is_content
from areal_gym.types import Content, ImagePart, Message, TextPart, images_of

IMAGE_COLUMNS = ("images", "image")
"""Where the pictures of a row are looked for, in this order."""
MARK = "<image>"
"""Stands in a prompt for the next picture of the row."""
_READ = (".png", ".jpg", ".jpeg", ".webp")
_ENDINGS = (*_READ, ".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif", ".svg")
"""Endings by which a text names a picture; most other formats than those that are read."""
_FILE_SCHEME = "file://"
_ADDRESS = re.compile(rf"(?!{_FILE_SCHEME})\w+://")
_BASE64 = re.compile(r"(iVBORw0KGgo|/9j/|UklGR)[A-Za-z0-9+/]{40}")
"""The beginning of a PNG, JPEG or WebP file in base64."""
_LARGEST_FILE = 64 * 2**20
_PARTS = ("image", "image_url", "input_image")
"""The types of parts that are pictures."""
_HOLDERS = ("bytes", "path", "image", "image_url", "url", "base64", "data")
"""The keys of objects under which a picture is looked for, in this order."""


def image_column(row: Mapping[str, Any]) -> str | None:
    """Return the name of the column with pictures; None if the row has none."""
    return next((name for name in IMAGE_COLUMNS if _has_picture(row.get(name))), None)


def read_images(value: Any, folder: Path, column: str = "images") -> list[ImagePart]:
    """Return the pictures of a column; their bytes are kept in the store of the process.

    Args:
        value: one picture or several: bytes, a path, a Pillow image, a `data:` URL, base64, or an
            object `{"bytes": ..., "path": ...}`, as `datasets.Image` has it in files.
        folder: where paths begin.
        column: the column's name, for errors.

    Raises:
        ValueError: a picture cannot be read; the text says which, and why.
    """
    pictures = value if isinstance(value, list | tuple) else [value]
    return [
        _read(picture, folder, f"column {column!r}, picture {number}")
        for number, picture in enumerate(pictures, start=1)
    ]


def with_read_parts(prompt: Any, folder: Path, column: str) -> Any:
    """Return messages whose parts name the pictures that they had in them.

    Values that are no messages with such parts are returned as they are; parts of type "image"
    without a picture stay, as marks of the row's next one.

    Raises:
        ValueError: a picture cannot be read; the text says which, and why.
    """
    if isinstance(prompt, Mapping):
        return with_read_parts([prompt], folder, column)[0]
    if not isinstance(prompt, list | tuple):
        return prompt
    messages: list[Any] = []
    number = itertools.count(1)
    for message in prompt:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            parts = [_part(part, folder, column, number) for part in content]
            message = {**message, "content": parts}
        messages.append(message)
    return messages


def _part(part: Any, folder: Path, column: str, number: Iterator[int]) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in _PARTS or "sha256" in part:
        return part
    if _held(part) is None:
        return {"type": "image"}
    return _read(part, folder, f"column {column!r}, picture {next(number)}")


def portable_row(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row whose pictures can be written as JSON: in base64, or as absolute paths.

    Args:
        row: columns by name; other values than pictures stay.
        folder: where paths begin.

    Raises:
        UsageError: a Pillow image has no pixels.
    """
    column = image_column(row)
    return {
        name: (_portable if name == column else _with_portable_parts)(value, folder)
        for name, value in row.items()
    }


def _with_portable_parts(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        if value.get("type") in _PARTS:
            return _portable(value, folder)
        return {key: _with_portable_parts(each, folder) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_portable_parts(each, folder) for each in value]
    return value


def _portable(value: Any, folder: Path) -> Any:
    if _is_pillow(value):
        # The run that reads the row refuses or scales it by its own limits.
        value = encode_png(value, ImageLimits(max_source_pixels=value.width * value.height))
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Path) or (isinstance(value, str) and _names_picture(value)):
        return str(value) if _ADDRESS.match(str(value)) else str(_path(value, folder).absolute())
    if isinstance(value, Mapping):
        return {key: _portable(each, folder) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(each, folder) for each in value]
    return value


def with_images(messages: Sequence[Message], images: Sequence[ImagePart]) -> list[Message]:
    """Return messages in which pictures stand in place of their marks, in order.

    A mark is the text `<image>`, or a part of type "image" without a picture of its own. Without
    any mark the pictures come first in the first message of a user.

    Raises:
        ValueError: there are more or fewer marks than pictures.
    """
    if not images:
        if any(map(has_empty_part, messages)):
            raise ValueError(
                "the messages have places of pictures, and the row has no pictures: "
                f"no column {' or '.join(IMAGE_COLUMNS)} has one"
            )
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


def require_no_marks(row: Mapping[str, Any], messages: Sequence[Message]) -> None:
    """Raise ValueError for marks of pictures in a row whose column of pictures is empty."""
    empty = [name for name in IMAGE_COLUMNS if name in row and row[name] in (None, "", [], ())]
    if empty and (num_marks := sum(map(_num_marks, messages))):
        raise ValueError(f"the prompt has {num_marks} marks of pictures, column {empty[0]!r} none")


def has_empty_part(message: Message) -> bool:
    """Return whether a message has a part of type "image" without a picture."""
    return any(_is_mark(part) for part in _parts(message["content"]))


def hashes(messages: Sequence[Message]) -> list[str]:
    """Return the hashes of the pictures of messages: rows with other pictures are other rows."""
    return [part["sha256"] for message in messages for part in images_of(message["content"])]


def _has_picture(value: Any) -> bool:
    # Of several, one is enough: the others are refused by their number, and not passed over.
    return any(map(_is_picture, value if isinstance(value, list | tuple) else [value]))


def _is_picture(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "sha256" in value or _held(value) is not None
    if isinstance(value, str):  # other texts are columns of texts that are called so
        is_inside = value.startswith("data:image/") or _BASE64.match(value) is not None
        return is_inside or _names_picture(value)
    return isinstance(value, bytes | bytearray | Path) or _is_pillow(value)


def _names_picture(text: str) -> bool:
    """Return whether a text is the path or the address of a picture: one line with its ending."""
    is_line = "\n" not in text and not text.startswith("data:")
    return is_line and text.lower().endswith(_ENDINGS)


def _is_pillow(value: Any) -> bool:
    return hasattr(value, "getexif") and hasattr(value, "convert")


def _held(value: Mapping[str, Any]) -> Any:
    """Return what an object has as its picture; None if it has none."""
    held = next((value[name] for name in _HOLDERS if value.get(name) is not None), None)
    return _held(held) if isinstance(held, Mapping) else held


def _read(picture: Any, folder: Path, which: str) -> ImagePart:
    if isinstance(picture, Mapping) and "sha256" in picture:  # read before: a task of a record
        return cast(ImagePart, dict(picture))
    try:
        if isinstance(picture, Mapping):
            picture = _held(picture)
        if isinstance(picture, bytearray):
            picture = bytes(picture)
        if isinstance(picture, str) and picture.startswith("data:"):
            raw, media_type = read_data_url(picture)
            return image_store().add(raw, media_type=media_type)
        if isinstance(picture, str) and _BASE64.match(picture):
            picture = decode_base64(picture)
        if isinstance(picture, str | Path):
            picture = _file(picture, folder)
        if isinstance(picture, bytes) or _is_pillow(picture):
            return image_store().add(picture)
    except (UsageError, OSError, ValueError) as error:
        raise ValueError(f"{which}: {error}") from None
    kind = "missing" if picture is None else f"a {type(picture).__name__}"
    raise ValueError(f"{which} is {kind}; needed are bytes, a path, base64 or a Pillow image")


def _file(path: str | Path, folder: Path) -> bytes:
    if _ADDRESS.match(str(path)):
        raise ValueError(f"{str(path)[:80]} is not fetched; download it, and give its path")
    file = _path(path, folder)
    if not file.is_file():
        kind = "is not a file" if file.exists() else "does not exist"
        raise ValueError(f"{file} {kind}; paths begin at {folder.absolute()}")
    if file.stat().st_size > _LARGEST_FILE:
        raise ValueError(f"{file} has more than {_LARGEST_FILE:,} bytes")
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _path(path: str | Path, folder: Path) -> Path:
    return folder / str(path).removeprefix(_FILE_SCHEME)


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
