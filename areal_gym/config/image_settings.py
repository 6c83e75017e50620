"""Settings of the images that a run reads."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from areal_gym.config.settings_model import Settings


class ImagesConfig(Settings):
    """Limits of the images in data and of those that environments and clients send
    (docs/vision.md)."""

    max_pixels: int | None = Field(None, ge=1)
    """Larger images are scaled down to this many pixels when they are read; null leaves that to the
    policy's processor, which has its own `max_pixels`."""
    min_pixels: int | None = Field(None, ge=1)
    """Smaller images are scaled up to this many pixels when they are read."""
    max_images: int = Field(32, ge=1)
    """Maximum images of a prompt. An episode whose prompt has more ends as if the context were
    full, and a client's request is refused (vLLM's `limit_mm_per_prompt`)."""
    max_bytes: int = Field(8 * 2**20, ge=1)
    """Maximum bytes of an encoded image; larger ones are refused."""
    max_source_pixels: int = Field(4 * 2**20, ge=1)
    """Maximum pixels of an encoded image; larger ones are refused before they are decoded."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_pixels and self.min_pixels > (self.max_pixels or self.max_source_pixels):
            raise ValueError(
                f"images.min_pixels = {self.min_pixels} is more than images.max_pixels = "
                f"{self.max_pixels or self.max_source_pixels}: no picture would do"
            )
        return self
