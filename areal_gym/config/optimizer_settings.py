"""Settings of the optimizer: the schedule of its learning rates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from areal_gym.config.settings_model import Settings


class LrScheduleConfig(Settings):
    """The learning rate's course after `trainer.warmup_steps`; the id alone is enough.

    It scales every learning rate alike: `trainer.lr`, `trainer.muon_lr`, `trainer.lr_groups` and
    the critic's (docs/trainer.md).
    """

    id: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """"linear" and "cosine" fall until the last step; "wsd" (warm-up, stable, decay) stays at the
    full rate and falls over the last part of the run."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """The learning rate at the end, as a share of the full one."""
    decay_share: float = Field(0.2, gt=0, le=1)
    """With "wsd": the share of the steps, the last ones, over which the rate falls."""
    decay: Literal["sqrt", "linear"] = "sqrt"
    """With "wsd": the rate falls as 1 - sqrt(share of the decay that is over), or linearly."""
    steps: int | None = Field(None, ge=1)
    """The step at which the rate has reached its end, where it stays; null is the run's `steps`."""

    @model_validator(mode="before")
    @classmethod
    def _accept_id(cls, value: Any) -> Any:
        return {"id": value} if isinstance(value, str) else value
