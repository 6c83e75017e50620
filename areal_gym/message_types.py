"""Chat messages: texts, pictures and tool calls; and the places of pictures among token ids.

A picture is a value with a hash: messages and token spans name it, an `areal_gym.images.ImageStore`
has its bytes. Standard library only; `areal_gym.types` has these names, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NotRequired, TypedDict


class FunctionCall(TypedDict):
    """A function and its arguments *as an object*: most chat templates would quote a string."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """One call of a tool, in OpenAI's format, except that `arguments` is an object."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class TextPart(TypedDict):
    """A text in the content of a message that has pictures, too."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """A picture in a message, named by its hash; an `areal_gym.images.ImageStore` has the bytes."""

    type: Literal["image"]
    sha256: str  # of the bytes in the store, in hexadecimal
    width: int  # in pixels, as `height`
    height: int
    media_type: str


Content = str | list[TextPart | ImagePart]
"""What a message says: a text, or texts and pictures in order. Policies write texts."""


class Message(TypedDict):
    """One chat message, in OpenAI's format, which chat templates and clients take."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content
    reasoning_content: NotRequired[str]  # before the answer (role "assistant")
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]  # of the tool (role "tool")
    parse_error: NotRequired[str]  # of a malformed tool call; environments reply with it


def text_of(content: Content) -> str:
    """Return the text of a message's content, without its pictures."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def readable(content: Content) -> str:
    """Return the text for people: each picture is written as `[image 640x480 ab12]`."""
    if isinstance(content, str):
        return content
    return "".join(
        part["text"] if part["type"] == "text" else image_label(part) for part in content
    )


def joined_content(contents: Sequence[Content], separator: str) -> Content:
    """Return several contents as one, texts between them; a text if none has a picture."""
    if all(isinstance(content, str) for content in contents):
        return separator.join(content for content in contents if isinstance(content, str))
    parts: list[TextPart | ImagePart] = []
    for number, content in enumerate(contents):
        if number and separator:
            parts.append({"type": "text", "text": separator})
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def map_text(content: Content, function: Callable[[str], str]) -> Content:
    """Return the content with a function of each of its texts."""
    if isinstance(content, str):
        return function(content)
    return [
        {"type": "text", "text": function(part["text"])} if part["type"] == "text" else part
        for part in content
    ]


def is_content(value: object) -> bool:
    """Return whether a value is what a message can say."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return bool(value) and all(
        isinstance(part, Mapping)
        and (
            (part.get("type") == "text" and isinstance(part.get("text"), str))
            or (
                part.get("type") == "image"
                and isinstance(part.get("sha256"), str)
                and all(isinstance(part.get(side), int) for side in ("width", "height"))
            )
        )
        for part in value
    )


def image_label(part: ImagePart) -> str:
    """Return the text that stands for a picture where none can be shown."""
    return f"[image {part['width']}x{part['height']} {part['sha256'][:4]}]"


def images_of(content: Content) -> list[ImagePart]:
    """Return the pictures of a message's content, in order."""
    return [] if isinstance(content, str) else [p for p in content if p["type"] == "image"]


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A picture among token ids: consecutive placeholders that an engine and a trainer replace.

    Pictures are placed by these references, never by their ids: a policy may sample the id of a
    placeholder, which then is a token like any other.
    """

    sha256: str
    """Of the bytes in the image store."""
    start: int
    """Index of the first placeholder: in its span, or in the whole row for `Prompt.images` and
    `Engine.generate`."""
    length: int
    """Number of placeholders."""
    grid: tuple[int, int, int] | None = None
    """Patches in time, height and width, for families whose positions depend on them (Qwen)."""

    def moved(self, offset: int) -> ImageRef:
        """Return the same picture, `offset` tokens later."""
        return replace(self, start=self.start + offset)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form."""
        grid = {} if self.grid is None else {"grid": list(self.grid)}
        return {"sha256": self.sha256, "start": self.start, "length": self.length, **grid}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> ImageRef:
        """Make it from the form that `to_dict` returns."""
        grid = row.get("grid")
        return cls(
            row["sha256"], row["start"], row["length"], None if grid is None else tuple(grid)
        )


def collapsed(token_ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
    """Return a row's ids with one placeholder per picture, as servers take them."""
    ids: list[int] = []
    start = 0
    for image in images:
        ids += token_ids[start : image.start + 1]
        start = image.start + image.length
    return ids + list(token_ids[start:])


def check_image_spans(images: Sequence[ImageRef], num_ids: int) -> None:
    """Raise ValueError unless the pictures are in order, apart, and within `num_ids` ids."""
    end = 0
    for image in images:
        if image.start < end or image.length < 1:
            raise ValueError(f"pictures overlap, or are out of order: {list(images)}")
        end = image.start + image.length
    if end > num_ids:
        raise ValueError(f"{num_ids} token ids but a picture until {end}")
