"""Reward shaping, before an estimator sees the rewards: pure functions of [G], in float64, on CPU.

overlong penalty -> bias, scale, clip -> (the estimator's normalisation) -> KL in the reward
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_gym.errors import ConfigError


def overlong_penalty(
    lengths_G: Tensor, *, max_length: int, tail: int, factor: float = 1.0
) -> Tensor:
    """Compute min(-(L - (max_length - tail)) / tail * factor, 0), to be added (DAPO, eq. 13).

    L are the policy's tokens of each trajectory. Over the last `tail` of `max_length` tokens the
    penalty grows from 0 to `factor`; longer trajectories (turns add up) lose no more than `factor`.

    Raises:
        ConfigError: a tail that is not within (0, max_length], or a negative factor.
    """
    if not 0 < tail <= max_length:
        raise ConfigError(
            f"tail = {tail} must be above 0 and at most max_length = {max_length} tokens"
        )
    if factor < 0:
        raise ConfigError(f"factor = {factor} would pay for length; 0 switches the penalty off")
    excess_G = lengths_G.to("cpu", torch.float64) - (max_length - tail)
    return -(excess_G / tail).clamp(0, 1) * factor


def shape_rewards(
    rewards_G: Tensor, *, bias: float = 0.0, scale: float = 1.0, clip: float | None = None
) -> Tensor:
    """Compute (r + bias) * scale, clipped to +-clip; None does not clip.

    Raises:
        ConfigError: a clip that is not above 0: it would make every reward the same.
    """
    if clip is not None and clip <= 0:
        raise ConfigError(f"clip = {clip} makes all rewards 0; null switches it off")
    shaped_G = (rewards_G.to("cpu", torch.float64) + bias) * scale
    return shaped_G if clip is None else shaped_G.clamp(-clip, clip)
