"""Contents of messages as clients of OpenAI's APIs send them."""

from __future__ import annotations

from typing import Any, Literal

from areal_gym.images.image_store import image_store
from areal_gym.images.reading import data_url
from areal_gym.message_types import Content


def openai_content(content: Content, api: Literal["chat", "responses"] = "chat") -> Any:
    """Return a message's content as OpenAI's clients send it, with pictures as `data:` URLs."""
    if isinstance(content, str):
        return content
    is_chat = api == "chat"
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text":
            parts.append({"type": "text" if is_chat else "input_text", "text": part["text"]})
            continue
        url = data_url(image_store().read(part["sha256"]))
        if is_chat:
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "input_image", "image_url": url, "detail": "auto"})
    return parts
