"""Pixels for Qwen's towers are those of transformers' image processor."""

import io

import pytest
import torch
from PIL import Image
from transformers import Gemma3ImageProcessorPil

from areal_gym.images import encode_png
from areal_gym.models.hf.qwen_pixels import QwenPixels
from tests._support.tiny_vision import image_processor, picture

GREY_LEVEL = 2 / 255
"""The difference that one of 255 levels of a color makes in pixels that go from -1 to 1."""


def stored(seed, size):
    return Image.open(io.BytesIO(encode_png(picture(seed, *size))))


@pytest.mark.parametrize("patch", [8, 14])
@pytest.mark.parametrize(
    "size", [(64, 64), (112, 56), (96, 64), (640, 480), (480, 640), (33, 200), (7, 5), (5, 700)]
)
def test_pixels_are_those_of_the_processor(size, patch):
    processor = image_processor("qwen3_vl", patch=patch)
    values, grid = QwenPixels(processor)(stored(0, size))
    expected = processor(images=[stored(0, size)], return_tensors="pt")
    assert torch.equal(grid, expected["image_grid_thw"])
    assert (values.shape, values.dtype) == (expected["pixel_values"].shape, torch.float32)
    is_scaled = (int(grid[0, 2]) * patch, int(grid[0, 1]) * patch) != size
    apart = (values - expected["pixel_values"]).abs()
    assert apart.max() < (1.01 * GREY_LEVEL if is_scaled else 1e-6)
    assert (apart > 1e-6).float().mean() < 0.01


def test_processors_with_other_settings_are_asked_themselves():
    assert QwenPixels.is_known(image_processor("qwen2_5_vl"))
    assert not QwenPixels.is_known(Gemma3ImageProcessorPil())
    for name in ("do_resize", "do_rescale", "do_normalize"):
        processor = image_processor("qwen2_5_vl")
        setattr(processor, name, False)
        assert not QwenPixels.is_known(processor)
