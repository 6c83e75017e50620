"""Pixels of pictures for Qwen's vision towers, faster than by transformers' processor.

    RGB picture -> scaled to whole squares of patches -> normalised -> [patches, values of a patch]

The pixels equal those of transformers' backend for torchvision, which inference servers use, bit
for bit. Its backend for Pillow scales by other code, and differs by one grey level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from areal_gym.chat.vision import PatchGrid

if TYPE_CHECKING:
    from PIL.Image import Image

_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil")
_BICUBIC = 3  # Pillow's number


class QwenPixels:
    """Makes pixels as an image processor of Qwen's families does.

    Args:
        processor: transformers' image processor, for which `is_known` is true.
    """

    def __init__(self, processor: Any) -> None:
        self._patch, self._merge = int(processor.patch_size), int(processor.merge_size)
        self._num_frames = int(processor.temporal_patch_size)
        self._grid = PatchGrid(
            patch_size=self._patch,
            merge_size=self._merge,
            min_pixels=int(processor.size["shortest_edge"]),
            max_pixels=int(processor.size["longest_edge"]),
        )
        self._mean_C11 = 255 * torch.tensor(processor.image_mean)[:, None, None]
        self._std_C11 = 255 * torch.tensor(processor.image_std)[:, None, None]

    @staticmethod
    def is_known(processor: Any) -> bool:
        """Return whether a processor does what this class does: one with the usual settings."""
        return (
            type(processor).__name__ in _PROCESSORS
            and all((processor.do_resize, processor.do_rescale, processor.do_normalize))
            and int(processor.resample) == _BICUBIC
            and abs(255 * processor.rescale_factor - 1) < 1e-6
        )

    def __call__(self, picture: Image) -> tuple[Tensor, Tensor]:
        """Return the values of an RGB picture's patches [P, V], and their grid [1, 3]."""
        pixels_HWC = torch.from_numpy(np.array(picture))
        _, grid = self._grid.size_of(*picture.size)
        patch, merge = self._patch, self._merge
        height, width = grid[1] * patch, grid[2] * patch
        if (height, width) != pixels_HWC.shape[:2]:
            pixels_1CHW = pixels_HWC.permute(2, 0, 1)[None]
            scaled_1CHW = F.interpolate(
                pixels_1CHW, (height, width), mode="bicubic", antialias=True
            )
            pixels_HWC = scaled_1CHW[0].permute(1, 2, 0)
        squares = (height // patch // merge, merge, patch, width // patch // merge, merge, patch)
        # Squares of patches by row and column, patches of a square, then channels and pixels. They
        # are moved as bytes, before each byte becomes a float of four bytes.
        pixels = pixels_HWC.reshape(*squares, 3).permute(0, 3, 1, 4, 6, 2, 5)
        patches = pixels.reshape(-1, 3, 1, patch * patch)
        values = (patches - self._mean_C11).div_(self._std_C11)
        # A picture is a film whose frames are equal.
        frames = values.expand(-1, -1, self._num_frames, -1)
        return frames.reshape(grid[1] * grid[2], -1), torch.tensor([grid])
