"""Read the contents of clients' messages: texts, and images, which are checked and stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from areal_gym.errors import UsageError
from areal_gym.gateway.http_messages import ApiError
from areal_gym.images import ImageLimits, image_limits, image_store, read_data_url
from areal_gym.images.reading import decode_base64
from areal_gym.types import Content, ImagePart, TextPart

Text = Annotated[str, Field(max_length=8_000_000)]
_PICTURES = ("image_url", "input_image", "image")
"""The types of image parts in chat completions, in responses, and in Anthropic's messages."""


class ImageUrl(BaseModel):
    """The URL of an image in a chat completion."""

    url: str


class ImageSource(BaseModel):
    """An image in Anthropic's format."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Part(BaseModel):
    """A piece of a message."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    source: ImageSource | None = None


class PictureReader:
    """Reads the contents of one request, checks its images against limits, and stores them.

    `can_see` says whether the policy accepts images.
    """

    def __init__(self, can_see: bool, limits: ImageLimits | None = None) -> None:
        self._can_see = can_see
        self._limits = limits or image_limits()
        self._num_images = self._num_bytes = 0

    def content(self, content: str | Sequence[Part] | None) -> Content:
        """Return the content of a message: text, or a list of parts if it has images.

        Raises:
            ApiError: a part is neither text nor an image, or an image is refused.
        """
        if content is None or isinstance(content, str):
            return content or ""
        if not any(part.type in _PICTURES for part in content):
            return text_of(content)
        parts: list[TextPart | ImagePart] = []
        for part in content:
            if part.type in _PICTURES:
                parts.append(self._picture(part))
            else:
                parts.append({"type": "text", "text": text_of([part])})
        return parts

    def _picture(self, part: Part) -> ImagePart:
        if not self._can_see:
            raise ApiError(
                400,
                "the request has a picture, and this policy cannot see: it reads texts only",
                code="unsupported_value",
            )
        self._num_images += 1
        if self._num_images > self._limits.max_images:
            most = self._limits.max_images
            raise ApiError(400, f"the request has more than {most} pictures", param="messages")
        try:
            raw, media_type = self._bytes_of(part)
            self._num_bytes += len(raw)
            if self._num_bytes > self._limits.max_request_bytes:
                most = self._limits.max_request_bytes
                raise UsageError(f"the pictures of the request have more than {most:,} bytes")
            return image_store().add(raw, media_type=media_type, limits=self._limits)
        except UsageError as error:
            raise ApiError(400, str(error), code="invalid_image", param="messages") from None

    def _bytes_of(self, part: Part) -> tuple[bytes, str]:
        source, url = part.source, part.image_url
        if source is not None and source.type == "base64" and source.data is not None:
            if len(source.data) * 3 // 4 > self._limits.max_bytes + 2:
                raise UsageError(f"a picture has more than {self._limits.max_bytes:,} bytes")
            return decode_base64(source.data), (source.media_type or "").lower()
        if source is not None:
            return read_data_url(source.url or source.type, self._limits)
        if url is None:
            raise UsageError(f"a part of type {part.type!r} has no picture in it: send a data: URL")
        return read_data_url(url if isinstance(url, str) else url.url, self._limits)


def text_of(content: str | Sequence[Part] | None) -> str:
    """Return the text of a message's content; raise ApiError for a part that is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            raise ApiError(400, f"a content part of type {part.type!r} cannot be read here")
    return "".join(part.text or "" for part in content)
