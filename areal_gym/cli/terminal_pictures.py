"""Draws pictures in a terminal: each character cell shows two pixels, one above the other."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from areal_gym.images import image_store
from areal_gym.images.reading import pillow
from areal_gym.message_types import ImagePart

_MOST_COLUMNS, _MOST_LINES = 96, 24
_HALF_BLOCK = "▀"


def print_pictures(parts: Iterable[ImagePart], *, is_plain: bool) -> None:
    """Print pictures of the process's store, and the files that hold them, for other viewers.

    They are drawn on terminals with colors only, and not if `is_plain`.
    """
    console = Console(highlight=False)
    is_drawn = console.is_terminal and console.color_system and not console.no_color
    for part in parts:
        if is_drawn and not is_plain:
            png = image_store().read(part["sha256"])
            console.print(blocks(png, columns=min(console.width, _MOST_COLUMNS)))
        print(image_store().path(part["sha256"]), flush=True)


def blocks(png: bytes, *, columns: int, lines: int = _MOST_LINES) -> Text:
    """Return a picture as colored half blocks, in at most so many columns and lines."""
    library = pillow()
    with library.open(BytesIO(png)) as picture:
        width, height = picture.size
        scale = min(1.0, columns / width, 2 * lines / height)
        size = (max(1, int(width * scale)), max(2, 2 * int(height * scale / 2)))
        pixels = picture.convert("RGB").resize(size, library.Resampling.BOX).load()
    text = Text(no_wrap=True)
    for top in range(0, size[1], 2):
        for x in range(size[0]):
            upper, lower = (Color.from_rgb(*pixels[x, y]) for y in (top, top + 1))
            text.append(_HALF_BLOCK, Style(color=upper, bgcolor=lower))
        text.append("\n")
    text.right_crop(1)
    return text
