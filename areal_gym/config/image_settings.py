"""Settings of the pictures that a run reads."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from areal_gym.config.settings_model import Settings


class ImagesConfig(Settings):
    """The limits of pictures, of data, environments and clients (docs/vision.md)."""

    max_pixels: int | None = Field(None, ge=1)
    """Larger pictures are scaled down to this many pixels when they are read; null leaves them to
    the policy's processor, which has a `max_pixels` of its own."""
    min_pixels: int | None = Field(None, ge=1)
    """Smaller pictures are scaled up to this many pixels when they are read."""
    max_images: int = Field(32, ge=1)
    """The most pictures of a prompt; an episode that asks for one with more ends as one whose
    context is full, and a client is refused (vLLM's `limit_mm_per_prompt`)."""
    max_bytes: int = Field(8 * 2**20, ge=1)
    """Pictures of more bytes, as they were sent, are refused."""
    max_source_pixels: int = Field(4 * 2**20, ge=1)
    """Pictures of more pixels, as they were sent, are refused before they are decoded."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_pixels and self.min_pixels > (self.max_pixels or self.max_source_pixels):
            raise ValueError(
                f"images.min_pixels = {self.min_pixels} is more than images.max_pixels = "
                f"{self.max_pixels or self.max_source_pixels}: no picture would do"
            )
        return self
