"""Reward shaping: what is done to rewards before an estimator sees them, in this order:

    overlong penalty -> bias, scale, clip -> (the estimator's normalisation) -> KL in the reward

Pure functions; rewards are [G] (trajectories) or [T] (policy tokens), in float64 on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.ratios import KL_ESTIMATORS, KlKind


def overlong_penalty(
    lengths_G: Tensor, *, max_length: int, tail: int, factor: float = 1.0
) -> Tensor:
    """Compute min(-(L - (max_length - tail)) / tail * factor, 0), to be added (DAPO, eq. 13).

    Args:
        lengths_G: generated tokens of each trajectory: the policy's, not the tools'.
        max_length: the limit of generated tokens.
        tail: over the last so many of them the penalty grows from 0 to `factor`. Trajectories
            beyond `max_length` (several turns may add up) lose no more than `factor`.

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


def subtract_kl(
    rewards_T: Tensor,
    logprobs_T: Tensor,
    reference_T: Tensor,
    *,
    coefficient: float,
    kind: KlKind = "k1",
) -> Tensor:
    """Compute r - coefficient * KL per token: the penalty for leaving the reference policy.

    Ouyang et al. 2022 (InstructGPT), eq. 2, with k1. It is a constant of the step: `logprobs_T`
    are those that sampled the tokens (recorded, or proximal), not those being trained.
    """
    kl_T = KL_ESTIMATORS[kind](logprobs_T.detach(), reference_T.detach())
    return rewards_T.to("cpu", torch.float64) - coefficient * kl_T.to("cpu", torch.float64)
