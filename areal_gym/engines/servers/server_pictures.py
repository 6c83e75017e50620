"""Images in requests: one placeholder and one `data:` URL each, which servers expand themselves.

Some servers refuse prompts that are expanded already, and others expand them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from areal_gym.chat.tokenizer import FastTokenizer
from areal_gym.chat.vision import Vision, banned_ids_of
from areal_gym.errors import EngineError
from areal_gym.images import data_url, image_store, read_data_url
from areal_gym.message_types import ImageRef

_NEVER = -100.0
"""A logit bias by which a token is never sampled."""


def image_urls(images: Sequence[ImageRef]) -> list[str]:
    """Return the `data:` URL of each image; the process's image store has the bytes."""
    store = image_store()
    return [data_url(store.read(image.sha256)) for image in images]


def without_placeholders(banned_ids: Sequence[int]) -> dict[str, object]:
    """Return sampling parameters, common to all servers, that exclude placeholders."""
    return {"logit_bias": {str(id): _NEVER for id in banned_ids}} if banned_ids else {}


def require_read_whole(url: str, num_read: object, num_sent: int) -> None:
    """Raise EngineError unless a server read as many tokens as the row has.

    Otherwise it saw other images than the row has, or none.
    """
    if num_read != num_sent:
        raise EngineError(
            f"{url} read {num_read} tokens of a prompt with images that has {num_sent}: it does "
            "not see them as the policy's own processor does",
            hints=[
                "SGLang: --enable-multimodal; without it, Gemma 3 and Llama 4 ignore images",
                "start the server with the policy's own directory",
            ],
        )


class PictureReader:
    """Expands the images of requests as servers do, for `EngineServer` and fake servers."""

    def __init__(self, policy: Path) -> None:
        self._policy = policy

    @cached_property
    def _vision(self) -> Vision | None:
        if not self.banned_ids:
            return None
        return Vision.from_checkpoint(self._policy, FastTokenizer(self._policy))

    @cached_property
    def banned_ids(self) -> tuple[int, ...]:
        """The ids of placeholders; empty if the policy does not accept images."""
        return banned_ids_of(self._policy)

    def expanded(
        self, token_ids: Sequence[int], urls: Sequence[str]
    ) -> tuple[list[int], tuple[ImageRef, ...]]:
        """Return a prompt with all placeholders, and its images, which are put into the store.

        Raises:
            ValueError: a URL is not an image, or the prompt has another number of placeholders.
        """
        if not urls:
            return list(token_ids), ()
        if self._vision is None:
            raise ValueError("this model does not accept images")
        try:
            parts = []
            for url in urls:
                raw, media_type = read_data_url(url)
                parts.append(image_store().add(raw, media_type=media_type))
            rendered = self._vision.expanded(token_ids, parts)
        except Exception as error:
            raise ValueError(str(error)) from None
        return list(rendered.token_ids), rendered.images
