"""The placeholders of images in the token ids of vision-language models, and their number.

    template      ... <|image_pad|> ...                   one mark per image
    row           ... 151655 151655 151655 ...            one placeholder per feature of the tower
    wire          ... 151655 ...                          servers expand it themselves

The number of placeholders depends only on the image's size, so images are not decoded, and no
processor class of transformers is needed (Qwen's require torchvision).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from areal_gym.chat.tokenizer import Tokenizer, read_json
from areal_gym.errors import ConfigError
from areal_gym.message_types import ImagePart, ImageRef, Message, images_of, text_of

_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
FAMILIES = (*_QWEN, "gemma3")
"""The supported families: values of `model_type` in `config.json`."""
_LONGEST_SIDES = 200
"""The maximum ratio of an image's sides that Qwen's processors accept."""


class Rendered(NamedTuple):
    """Token ids, and the images among them."""

    token_ids: tuple[int, ...]
    images: tuple[ImageRef, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchGrid:
    """The geometry of Qwen's vision towers: an image is scaled to whole squares of patches.

    Source: `smart_resize` of transformers' `qwen2_vl` (Qwen2-VL, arXiv:2409.12191, section 2.1).
    """

    patch_size: int
    merge_size: int
    """The side, in patches, of the square that becomes one placeholder."""
    min_pixels: int
    max_pixels: int

    def size_of(self, width: int, height: int) -> tuple[int, tuple[int, int, int]]:
        """Return the number of placeholders, and that of patches in time, height and width.

        Raises:
            ConfigError: the image is too narrow.
        """
        if max(width, height) > _LONGEST_SIDES * min(width, height):
            raise ConfigError(
                f"a picture of {width} x {height} pixels is too narrow: this policy's processor "
                f"takes sides with a ratio of at most {_LONGEST_SIDES}"
            )
        unit = self.patch_size * self.merge_size
        # `round` rounds halves to even numbers, as the original code does.
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / scale / unit))
            columns = max(1, math.floor(width / scale / unit))
        elif rows * columns * unit**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * scale / unit), math.ceil(width * scale / unit)
        return rows * columns, (1, rows * self.merge_size, columns * self.merge_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vision:
    """The image format of a vision-language checkpoint."""

    family: str
    """The `model_type` in the checkpoint's configuration."""
    mark: str
    """The text that the chat template writes for an image."""
    written: str
    """The text with which the family's processor replaces `mark`; it has one `placeholder`."""
    placeholder: str
    placeholder_id: int
    """The id that is repeated for each of the tower's features."""
    banned_ids: tuple[int, ...]
    """The ids that a policy may not sample, because engines would take them for images."""
    grid: PatchGrid | None
    """The geometry of patches; None if all images have `num_placeholders`."""
    num_placeholders: int = 0

    @classmethod
    def from_checkpoint(cls, directory: Path, tokenizer: Tokenizer) -> Vision | None:
        """Read the format from a checkpoint; None for a model without a supported vision tower.

        Raises:
            ConfigError: a value is missing in the checkpoint's files, or is not supported.
        """
        config = read_json(directory / "config.json")
        if "vision_config" not in config:
            return None
        family = str(config.get("model_type"))
        if family not in FAMILIES:
            # Such a model can still be trained on text.
            return None
        processor = read_json(directory / "processor_config.json")
        pictures = processor.get("image_processor") or read_json(
            directory / "preprocessor_config.json"
        )
        try:
            if family in _QWEN:
                return cls._qwen(family, config, pictures, tokenizer)
            return cls._gemma(family, config, pictures, tokenizer)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{directory} is a {family}, and its files do not say {error}",
                hints=["a vision-language model needs config.json and preprocessor_config.json"],
            ) from None

    @classmethod
    def _qwen(
        cls,
        family: str,
        config: Mapping[str, Any],
        pictures: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> Vision:
        image_id, video_id = int(config["image_token_id"]), int(config["video_token_id"])
        size = pictures.get("size") or {}
        least, most = pictures.get("min_pixels"), pictures.get("max_pixels")
        text = tokenizer.decode([image_id])
        return cls(
            family=family,
            mark=text,
            written=text,
            placeholder=text,
            placeholder_id=image_id,
            banned_ids=(image_id, video_id),
            grid=PatchGrid(
                patch_size=int(pictures["patch_size"]),
                merge_size=int(pictures["merge_size"]),
                min_pixels=int(size["shortest_edge"] if least is None else least),
                max_pixels=int(size["longest_edge"] if most is None else most),
            ),
        )

    @classmethod
    def _gemma(
        cls,
        family: str,
        config: Mapping[str, Any],
        pictures: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> Vision:
        if pictures.get("do_pan_and_scan"):
            raise ConfigError(
                "this Gemma 3 cuts pictures into crops (do_pan_and_scan), which is not supported",
                hints=["set do_pan_and_scan to false in its preprocessor_config.json"],
            )
        image_id = config.get("image_token_id", config.get("image_token_index"))
        if image_id is None:
            raise KeyError("image_token_index")
        text = tokenizer.decode([int(image_id)])
        begin, end = (tokenizer.decode([int(config[f"{n}_token_index"])]) for n in ("boi", "eoi"))
        return cls(
            family=family,
            mark=begin,
            written=f"\n\n{begin}{text}{end}\n\n",
            placeholder=text,
            placeholder_id=int(image_id),
            banned_ids=(int(image_id),),
            grid=None,
            num_placeholders=int(config["mm_tokens_per_image"]),
        )

    def size_of(self, image: ImagePart) -> tuple[int, tuple[int, int, int] | None]:
        """Return an image's number of placeholders, and its grid of patches if it has one."""
        if self.grid is None:
            return self.num_placeholders, None
        return self.grid.size_of(image["width"], image["height"])

    def expanded(self, token_ids: Sequence[int], images: Sequence[ImagePart]) -> Rendered:
        """Return a rendered row with all placeholders of its images.

        Args:
            token_ids: the ids of the template's text, with one placeholder per image.
            images: the images, in order.

        Raises:
            ConfigError: the numbers of placeholders and images differ.
        """
        num_placed = token_ids.count(self.placeholder_id)
        if num_placed != len(images):
            raise ConfigError(
                f"the chat template writes {num_placed} placeholders for {len(images)} pictures"
            )
        ids: list[int] = []
        refs: list[ImageRef] = []
        start = 0
        for image in images:
            place = token_ids.index(self.placeholder_id, start)
            length, grid = self.size_of(image)
            ids += token_ids[start:place]
            refs.append(ImageRef(image["sha256"], len(ids), length, grid))
            ids += [self.placeholder_id] * length
            start = place + 1
        return Rendered((*ids, *token_ids[start:]), tuple(refs))

    def processed(self, text: str) -> str:
        """Return the template's text with the changes that the family's processor makes."""
        return text if self.mark == self.written else text.replace(self.mark, self.written)


def has_image_processor(directory: Path) -> bool:
    """Return whether a checkpoint has the configuration of an image processor."""
    names = ("preprocessor_config.json", "processor_config.json")
    return any((directory / name).is_file() for name in names)


def banned_ids_of(directory: Path) -> tuple[int, ...]:
    """Return the ids that a checkpoint's policy may not sample; none if it does not accept images.

    The trainer gives them no probability either.
    """
    if not (directory / "config.json").is_file():
        return ()
    config = read_json(directory / "config.json")
    if config.get("model_type") not in FAMILIES or not has_image_processor(directory):
        return ()
    image_id = config.get("image_token_id", config.get("image_token_index"))
    ids = (image_id, config.get("video_token_id"))
    return tuple(int(id) for id in ids if id is not None)


def pictures(messages: Sequence[Message]) -> list[ImagePart]:
    """Return the images of messages, in order."""
    return [part for message in messages for part in images_of(message["content"])]


def with_seen_pictures(messages: Sequence[Message], roles: Collection[str]) -> list[Message]:
    """Return the messages with images only in messages of these roles.

    Other images are moved to a user message after them; for tool results, after the last of them.
    """
    changed: list[Message] = []
    waiting: list[ImagePart] = []
    for index, message in enumerate(messages):
        content = message["content"]
        images = images_of(content)
        if not images or message["role"] not in roles:
            waiting += images
            message = {**message, "content": text_of(content)}
        changed.append(message)
        next_role = messages[index + 1]["role"] if index + 1 < len(messages) else ""
        if waiting and not (message["role"] == "tool" == next_role):
            changed.append({"role": "user", "content": [*waiting]})
            waiting = []
    return changed


def seen(
    messages: Sequence[Message], vision: Vision | None, roles: Collection[str]
) -> Sequence[Message]:
    """Return the messages with images only in messages whose images the template writes.

    Args:
        messages: a dialogue, or a part of one.
        vision: the policy's image format; None if it does not accept images.
        roles: the roles in whose messages the template writes images.

    Raises:
        ConfigError: there are images, and the policy or the template does not accept them.
    """
    if not pictures(messages):  # all parts are texts
        return [{**message, "content": text_of(message["content"])} for message in messages]
    if vision is None:
        raise ConfigError(
            "the dialogue has pictures, and this policy cannot see",
            hints=[f"take a vision-language model ({', '.join(FAMILIES)})"],
        )
    if "user" not in roles:
        raise ConfigError("the chat template of this policy drops pictures of users' messages")
    return with_seen_pictures(messages, roles)
