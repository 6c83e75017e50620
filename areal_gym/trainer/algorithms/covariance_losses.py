"""Policy losses that hold back the tokens which cost the most entropy (Cui et al. 2025).

The entropy of a policy falls by about the covariance of log-probability and advantage ("The
Entropy Mechanism of Reinforcement Learning", 2505.22617, theorem 1). Few tokens make up most of it:

    cov_t = (logp_t - mean logp) (A_t - mean A)

Means and picks are over all tokens of an update, in a pass of its own (`losses.with_batch_pass`).
The definitions, with defaults, are those of verl (`verl/trainer/ppo/core_algos.py`, August 2026),
which takes the means over a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.losses import (
    LossInputs,
    LossOutput,
    ppo_clip,
    with_batch_pass,
)
from areal_gym.trainer.algorithms.ratios import ratio


def _covariances(batch: LossInputs) -> Tensor:
    """Return the share of each token in the covariance of log-probability and advantage, [T]."""
    logprobs_T, advantages_T = batch.logprobs.detach(), batch.advantages
    return (advantages_T - advantages_T.mean()) * (logprobs_T - logprobs_T.mean())


def pick_clip_cov(
    batch: LossInputs,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    cov_fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """Pick at random max(1, cov_fraction T) of the tokens with cov_low < cov < cov_high.

    Tokens that the clip stops anyway are not among them. The same tokens are picked of the same
    batch, in whatever order it comes; verl draws from torch's global generator.

    Raises:
        ConfigError: a fraction that is not above 0, or bounds that hold nothing.
    """
    _check_fraction(cov_fraction)
    if cov_low >= cov_high:
        raise ConfigError(f"cov_low = {cov_low} must be below cov_high = {cov_high}")
    cov_T = _covariances(batch)
    clipped = ppo_clip(batch, clip_low=clip_low, clip_high=clip_high)
    is_open_T = clipped.metrics["clip_fraction"] == 0
    (candidates,) = ((cov_T > cov_low) & (cov_T < cov_high) & is_open_T).nonzero(as_tuple=True)
    num_picked = max(int(cov_fraction * len(cov_T)), 1)
    if len(candidates) > num_picked:
        ranked = candidates[cov_T[candidates].argsort(stable=True)]
        generator = torch.Generator().manual_seed(len(cov_T))
        drawn = torch.randperm(len(ranked), generator=generator)[:num_picked]
        candidates = ranked[drawn.to(ranked.device)]
    return _marked(cov_T, candidates)


@with_batch_pass(pick_clip_cov)
def clip_cov(
    batch: LossInputs,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    cov_fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> LossOutput:
    """Compute `ppo_clip`, and 0 for the tokens that `pick_clip_cov` picks (Cui et al. 2025).

    Their gradient is cut off, and they stay in the divisor. The defaults are verl's.
    """
    picked_T = batch.picked
    if picked_T is None:
        picked_T = pick_clip_cov(
            batch,
            clip_low=clip_low,
            clip_high=clip_high,
            cov_fraction=cov_fraction,
            cov_low=cov_low,
            cov_high=cov_high,
        )
    clipped = ppo_clip(batch, clip_low=clip_low, clip_high=clip_high)
    return LossOutput(
        loss=clipped.loss.masked_fill(picked_T, 0.0),
        metrics={**clipped.metrics, "picked_fraction": picked_T.float()},
    )


def pick_kl_cov(
    batch: LossInputs, *, cov_fraction: float = 2e-4, kl_coefficient: float = 0.1
) -> Tensor:
    """Pick the max(1, cov_fraction T) tokens with the largest covariance.

    Raises:
        ConfigError: a fraction that is not above 0.
    """
    _check_fraction(cov_fraction)
    cov_T = _covariances(batch)
    num_picked = min(max(int(cov_fraction * len(cov_T)), 1), len(cov_T))
    return _marked(cov_T, cov_T.topk(num_picked).indices)


@with_batch_pass(pick_kl_cov)
def kl_cov(
    batch: LossInputs, *, cov_fraction: float = 2e-4, kl_coefficient: float = 0.1
) -> LossOutput:
    """Compute -A r, plus kl_coefficient |logp - prox| for picked tokens (Cui et al. 2025).

    The tokens that `pick_kl_cov` picks are those with the largest covariance; there is no clip. The
    defaults are verl's (`kl_cov_ratio`, `ppo_kl_coef`).
    """
    picked_T = batch.picked
    if picked_T is None:
        picked_T = pick_kl_cov(batch, cov_fraction=cov_fraction, kl_coefficient=kl_coefficient)
    log_ratio_T = batch.logprobs - batch.proximal
    ratio_T = ratio(log_ratio_T)
    penalty_T = kl_coefficient * log_ratio_T.abs() * picked_T
    return LossOutput(
        loss=-batch.advantages * ratio_T + penalty_T,
        metrics={"ratio": ratio_T.detach(), "picked_fraction": picked_T.float()},
    )


def _check_fraction(cov_fraction: float) -> None:
    if not 0 < cov_fraction <= 1:
        raise ConfigError(f"cov_fraction = {cov_fraction} must be above 0 and at most 1")


def _marked(like_T: Tensor, places: Tensor) -> Tensor:
    marks_T = torch.zeros_like(like_T, dtype=torch.bool)
    marks_T[places] = True
    return marks_T
