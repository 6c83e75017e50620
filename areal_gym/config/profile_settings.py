"""Settings of profiles."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from areal_gym.config.settings_model import Settings


class ProfileConfig(Settings):
    """Profiles of training steps: where their time and memory go (docs/trainer.md)."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps that each rank profiles; a profiled step is slower, the others are not."""
    directory: str | None = None
    """Where the profiles are written; null is `profiles` in the run directory."""
