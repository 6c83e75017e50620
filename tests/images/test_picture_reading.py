"""Foreign pictures: what is read, what is refused, and what comes out."""

import base64
import io
import random
import zlib

import pytest
from PIL import Image, ImageChops, ImageStat

from areal_gym.errors import UsageError
from areal_gym.images import ImageLimits, data_url, encode_png, read_data_url, read_image
from tests._support.tiny_vision import picture


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def decoded(png):
    return Image.open(io.BytesIO(png))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_formats_are_read_and_come_out_as_png(kind):
    png, width, height = read_image(encoded(picture(1, 96, 64), kind))
    image = decoded(png)
    assert (image.format, image.mode, image.size, (width, height)) == (
        "PNG",
        "RGB",
        (96, 64),
        (96, 64),
    )


def test_reading_a_read_picture_changes_nothing():
    png, *_ = read_image(encoded(picture(2), "PNG", compress_level=9))
    assert read_image(png)[0] == png


def test_metadata_is_left_out_and_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    exif[0x010E] = "secret place"
    png, width, height = read_image(encoded(picture(3, 96, 64), "JPEG", exif=exif))
    assert (width, height) == decoded(png).size == (64, 96)
    assert b"secret" not in png
    assert not decoded(png).getexif()


def test_a_jpeg_that_is_scaled_down_looks_as_if_it_was_decoded_whole():
    image = picture(5, 512, 384)
    limits = ImageLimits(max_pixels=64 * 48)
    png, width, height = read_image(encoded(image, "JPEG", quality=95), limits)
    assert (width, height) == (64, 48)
    whole = decoded(encode_png(image, limits))
    assert ImageStat.Stat(ImageChops.difference(decoded(png), whole)).mean < [8, 8, 8]


def test_a_picture_of_the_caller_is_not_changed():
    image = Image.frombytes("RGB", (1300, 1100), random.Random(0).randbytes(3 * 1300 * 1100))
    image.info["icc_profile"] = b"profile"
    png = encode_png(image)
    assert image.info == {"icc_profile": b"profile"}
    assert "icc_profile" not in decoded(png).info


def test_transparent_pixels_become_white():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    png, *_ = read_image(encoded(clear))
    assert decoded(png).getpixel((3, 3)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_and_not_clipped():
    grey = Image.new("I;16", (8, 8), 32768)
    png, *_ = read_image(encoded(grey))
    assert decoded(png).getpixel((0, 0)) == (127, 127, 127)


def bomb(width, height):
    """A PNG whose header says so many pixels, and which has none."""

    def chunk(kind, body):
        head = len(body).to_bytes(4, "big") + kind + body
        return head + zlib.crc32(kind + body).to_bytes(4, "big")

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    header = chunk(b"IHDR", size + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(2049, 2048), (13_000, 13_000), (20_000, 20_000)])
def test_too_many_pixels_are_refused_before_decoding(size):
    with pytest.raises(UsageError, match="at most 4,194,304 pixels"):
        read_image(bomb(*size))


def animation(kind):
    frames = [picture(i) for i in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "cannot be read"),
        (b"GIF89a" + bytes(40), "cannot be read"),
        (encoded(picture(1), "GIF"), "cannot be read"),
        (encoded(picture(1), "BMP"), "cannot be read"),
        (encoded(picture(1))[:-60], "cannot be read"),
        (encoded(picture(1))[:30], "cannot be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read"),
        (animation("PNG"), "3 frames"),
        (animation("WEBP"), "3 frames"),
        (bytes(8 * 2**20 + 1), "8,388,609 bytes is too large"),
    ],
)
def test_what_is_not_one_whole_picture_is_refused(raw, reason):
    with pytest.raises(UsageError, match=reason):
        read_image(raw)


def test_a_wrong_media_type_is_refused():
    jpeg = encoded(picture(1), "JPEG")
    read_image(jpeg, media_type="image/jpeg")
    read_image(jpeg, media_type="image/jpg")
    with pytest.raises(UsageError, match="is called image/png, but its bytes are image/jpeg"):
        read_image(jpeg, media_type="image/png")


def test_limits_are_settings():
    with pytest.raises(UsageError, match="64 x 64"):
        read_image(encoded(picture(1)), ImageLimits(max_source_pixels=4095))
    assert read_image(encoded(picture(1)), ImageLimits(max_source_pixels=4096))


def test_data_urls_round_trip():
    raw = encoded(picture(1))
    assert read_data_url(data_url(raw)) == (raw, "image/png")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1/x.png", "a http: URL is not fetched"),
        ("https://example.org/x.png", "a https: URL is not fetched"),
        ("file:///etc/hostname", "a file: URL is not fetched"),
        ("/etc/hostname", "this text is not fetched"),
        ("data:image/png,%89PNG", "begins with data:image/png;base64,"),
        ("data:image/png;base64,!!!!", "base64 of a picture is broken"),
        ("data:image/png;base64," + base64.b64encode(bytes(9 * 2**20)).decode(), "too large"),
    ],
)
def test_other_urls_are_refused_with_the_reason(url, reason):
    with pytest.raises(UsageError, match=reason):
        read_data_url(url)


def noise(width=640, height=480):
    return Image.frombytes("RGB", (width, height), random.Random(0).randbytes(3 * width * height))


@pytest.mark.parametrize(
    ("image", "most"),
    [(noise(), 3 * 640 * 480 + 1000), (picture(1, 640, 480), 20_000), (noise(1300, 1100), 2**23)],
    ids=["photograph", "drawn", "large"],
)
def test_pictures_are_written_as_they_are_and_read_by_every_reader(image, most):
    png = encode_png(image)
    made = decoded(png)
    assert made.tobytes() == image.tobytes()
    assert len(png) < most
    made = decoded(png)
    made.verify()  # the sums of all chunks
    assert read_image(png)[0] == png
