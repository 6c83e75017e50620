"""Reads pictures from outside: limits, then the header, then the pixels, which are encoded anew.

    bytes -> size, format and frames of the header -> decode -> EXIF turned -> RGB -> PNG

What comes out has one hash for equal pixels, no metadata, and no byte that a foreign program wrote:
no parser behind this one (a viewer's, an inference server's) reads foreign bytes.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
import zlib
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from areal_gym.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

MEDIA_TYPE = "image/png"
"""The type of all pictures in a store."""

_FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "MPO": "image/jpeg", "WEBP": "image/webp"}
"""Pillow's names of the formats that are read; MPO is a JPEG file with further pictures behind."""
_DATA_URL = re.compile(r"data:([\w/+.-]*);base64,", re.IGNORECASE)
_SAMPLED_LINES = 8
"""So many lines, evenly spread, show how much smaller a picture becomes by compression."""
_MOST_PLAIN = 4 * 2**20
"""Bytes of pixels that are kept without compression; what is sent around stays below that."""
_CRC = {kind: zlib.crc32(kind) for kind in (b"IHDR", b"IDAT", b"IEND")}
_TYPES = {"image/jpg": "image/jpeg"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLimits:
    """Bounds the size of pictures: which are refused, and to what others are scaled."""

    max_source_pixels: int = 4 * 2**20
    """Pictures of more pixels, as they were sent, are refused before they are decoded."""
    max_pixels: int | None = None
    """Larger pictures are scaled down to so many."""
    min_pixels: int | None = None
    """Smaller pictures are scaled up to so many."""
    max_bytes: int = 8 * 2**20
    """Of one picture, as it was sent."""
    max_images: int = 32
    """Pictures of one prompt, or of one request."""
    max_request_bytes: int = 32 * 2**20
    """All pictures of one request together."""

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which a picture is scaled; its ratio of sides is kept."""
        num_pixels = width * height
        if self.max_pixels is not None and num_pixels > self.max_pixels:
            scale = math.sqrt(self.max_pixels / num_pixels)
            # A side of one pixel cannot be divided: the other one gives way.
            width = min(max(1, math.floor(width * scale)), self.max_pixels)
            return width, max(1, min(math.floor(height * scale), self.max_pixels // width))
        if self.min_pixels is not None and num_pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / num_pixels)
            return math.ceil(width * scale), math.ceil(height * scale)
        return width, height


_limits = ImageLimits()


def image_limits() -> ImageLimits:
    """Return the limits of the process: those of the run that it opened last."""
    return _limits


def set_image_limits(limits: ImageLimits) -> None:
    """Set the limits of all pictures that this process reads from now on."""
    global _limits
    _limits = limits


def pillow() -> Any:
    """Return Pillow's module `PIL.Image`; raise ConfigError where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            "pictures need Pillow, which is not installed",
            hints=["pip install 'areal-gym[vision]'"],
        ) from None
    return Image


def read_image(
    raw: bytes, limits: ImageLimits | None = None, *, media_type: str | None = None
) -> tuple[bytes, int, int]:
    """Return a picture from outside as PNG bytes, with its width and height in pixels.

    Args:
        raw: the bytes of a PNG, JPEG or WebP file.
        limits: how large it may be.
        media_type: the type by which the sender calls it, if any: it must be the true one.

    Raises:
        UsageError: it is too large, has several frames, is broken, or is not of these formats.
    """
    limits = limits or image_limits()
    if len(raw) > limits.max_bytes:
        raise UsageError(
            f"a picture of {len(raw):,} bytes is too large; at most {limits.max_bytes:,} are read"
        )
    library = pillow()
    try:
        # Only the header is read here.
        picture = library.open(BytesIO(raw), formats=("PNG", "JPEG", "WEBP"))
        true_type = _FORMATS[picture.format]
        num_frames = 1 if picture.format == "MPO" else getattr(picture, "n_frames", 1)
    except (library.DecompressionBombError, library.DecompressionBombWarning) as error:
        raise _too_many_pixels(f"({error})", limits) from None
    except Exception as error:  # whatever a decoder raises, the bytes have caused it
        raise _unreadable(error) from None
    if num_frames > 1:
        raise UsageError(f"a picture of {num_frames} frames; animations are not read")
    if media_type is not None and _TYPES.get(media_type, media_type) != true_type:
        raise UsageError(f"a picture is called {media_type}, but its bytes are {true_type}")
    try:
        _require_size(picture, limits)
        # A JPEG that is scaled down is decoded at a half, a quarter or an eighth of its size.
        picture.draft(None, limits.fitted(*picture.size))
        png = encode_png(picture, limits)
    except UsageError:
        raise
    except Exception as error:
        raise _unreadable(error) from None
    return png, *png_size(png)


def png_size(png: bytes) -> tuple[int, int]:
    """Return width and height of a PNG file, from its header."""
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def encode_png(picture: Image.Image, limits: ImageLimits | None = None) -> bytes:
    """Return a Pillow image as an RGB PNG, upright, scaled as `limits` say, without metadata.

    Transparent pixels get a white background. Equal pixels give equal bytes.

    Raises:
        UsageError: it has no pixels, or too many.
    """
    import numpy as np
    from PIL import ExifTags, Image, ImageOps

    limits = limits or image_limits()
    _require_size(picture, limits)
    picture.load()  # EXIF data may follow the pixels
    upright = picture
    if picture.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        upright = ImageOps.exif_transpose(picture)
    if upright.mode.startswith("I"):  # 16 bits and more; `convert` would clip them
        upright = upright.point(lambda value: value / 257).convert("L")
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        upright = Image.new("RGB", layer.size, "white")
        upright.paste(layer, mask=layer.getchannel("A"))
    rgb = upright if upright.mode == "RGB" else upright.convert("RGB")
    if (fitted := limits.fitted(*rgb.size)) != rgb.size:
        rgb = rgb.resize(fitted, Image.Resampling.BICUBIC)
    pixels_HWC = np.asarray(rgb)
    # Of a photograph, filters and deflate take 22 of 25 ms and save a fourth. A sample of the lines
    # says whether this is one; drawn pictures become much smaller in a few milliseconds.
    sample = pixels_HWC[:: math.ceil(rgb.height / _SAMPLED_LINES)]
    is_worth = 2 * len(zlib.compress(sample.tobytes(), 1)) < sample.nbytes
    if is_worth or pixels_HWC.nbytes <= _MOST_PLAIN:
        return _unfiltered_png(pixels_HWC, int(is_worth))
    rgb = rgb.copy()
    rgb.info.clear()  # else a colour profile would be written
    out = BytesIO()
    rgb.save(out, "PNG", compress_level=1)
    return out.getvalue()


def _unfiltered_png(pixels_HWC: NDArray[np.uint8], level: int) -> bytes:
    """Return RGB pixels as a PNG without filters, which Pillow cannot write; level 0 only packs.

    Source: PNG, third edition (W3C), sections 5 and 11.2.
    """
    import numpy as np

    height, width, _ = pixels_HWC.shape
    # Each line begins with the number of its filter: 0 is none.
    lines = np.zeros((height, 1 + 3 * width), np.uint8)
    lines[:, 1:] = pixels_HWC.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.data, level)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(body, _CRC[kind]))
        for kind, body in chunks
    )


def data_url(png: bytes) -> str:
    """Return the `data:` URL of a picture of the store."""
    return f"data:{MEDIA_TYPE};base64,{base64.b64encode(png).decode('ascii')}"


def read_data_url(url: str, limits: ImageLimits | None = None) -> tuple[bytes, str]:
    """Return the bytes and the media type of a `data:` URL.

    Raises:
        UsageError: it is another kind of URL, which nothing here fetches, or it is broken.
    """
    limits = limits or image_limits()
    match = _DATA_URL.match(url)
    if match is None:
        scheme = url[:64].partition(":")[0] if ":" in url[:64] else ""
        if scheme.lower() == "data":
            raise UsageError("a data: URL of a picture begins with data:image/png;base64,")
        raise UsageError(
            f"pictures are data: URLs; {'a ' + scheme[:16] + ': URL' if scheme else 'this text'} "
            "is not fetched, because a server that fetches addresses for others can be misused",
            hints=["send the bytes: data:image/png;base64,..."],
        )
    if (len(url) - match.end()) * 3 // 4 > limits.max_bytes + 2:
        raise UsageError(f"a picture is too large; at most {limits.max_bytes:,} bytes are read")
    return decode_base64(url[match.end() :]), match[1].lower()


def decode_base64(text: str) -> bytes:
    """Return the bytes of a picture in base64; raise UsageError if it is something else."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"the base64 of a picture is broken: {error}") from None


def _require_size(picture: Image.Image, limits: ImageLimits) -> None:
    if picture.width * picture.height > limits.max_source_pixels:
        size = f"of {picture.width:,} x {picture.height:,} pixels"
        raise _too_many_pixels(size, limits)
    if not all(picture.size):
        raise UsageError(f"a picture of {picture.width} x {picture.height} pixels shows nothing")


def _too_many_pixels(size: str, limits: ImageLimits) -> UsageError:
    return UsageError(
        f"a picture {size} is too large; at most {limits.max_source_pixels:,} pixels are read",
        hints=[
            "make it smaller: models reduce pictures of that size anyway",
            "or read it: images.max_source_pixels=50_000_000, scaled: images.max_pixels=1_000_000",
        ],
    )


def _unreadable(error: Exception) -> UsageError:
    reason = f"{type(error).__name__}: {str(error)[:120]}"
    if isinstance(error, pillow().UnidentifiedImageError):
        reason = "its bytes are of another format, or not a picture"
    return UsageError(f"a picture cannot be read ({reason}); whole PNG, JPEG and WebP files can")
