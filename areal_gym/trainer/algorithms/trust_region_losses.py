"""Policy losses that bound a step by other means than the clip of each token's ratio.

All tensors are [T]. The definitions and defaults are those of the functions of verl
(`verl/trainer/ppo/core_algos.py`, August 2026), whose `old_log_prob` is the proximal policy here:
the sampling policy where `trainer.correction.proximal=recorded`. verl's configuration may set other
numbers than its functions have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.losses import LossInputs, LossOutput, weighted_by_sequence
from areal_gym.trainer.algorithms.ratios import ratio, sequence_mean, sequence_ratio

_KL_EPS = 1e-8
"""verl adds this to probabilities of 0 before their logarithm."""


def dppo_tv(
    batch: LossInputs,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    truncation: float = 20.0,
) -> LossOutput:
    """Compute DPPO's loss with the binary total variation (Qi et al. 2026, 2602.04879).

    -A sg(min(r, truncation)) logp, without the tokens that have left the trust region in the
    direction of their advantage: p - p_prox > clip_high where A > 0, p - p_prox < -clip_low
    elsewhere. p are probabilities, so that rare tokens may change their ratio by a lot and likely
    ones may not. None switches a bound off. The paper takes 0.15 (the preset `dppo`) and ratios
    against the sampling policy; verl's default is 0.2. `truncation` is verl's `clip_ratio_c`, for
    which the paper (section 5.4) recommends a large number; 20 is what verl's function takes where
    the configuration has none (its configuration has 3, its script for DPPO 10,000).
    """
    change_T = batch.logprobs.detach().exp() - batch.proximal.exp()
    is_up_out_T = _beyond(change_T, clip_high)
    is_down_out_T = _beyond(-change_T, clip_low)
    is_out_T = torch.where(batch.advantages > 0, is_up_out_T, is_down_out_T)
    return _masked_reinforce(batch, is_out_T, truncation)


def dppo_kl(
    batch: LossInputs,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    truncation: float = 20.0,
) -> LossOutput:
    """Compute DPPO's loss with the binary KL divergence (Qi et al. 2026, 2602.04879).

    As `dppo_tv`, with KL(p_prox || p) of "this token" against "any other" as the divergence: a
    token is left out where it is above `clip_high`, A > 0 and p > p_prox, and where it is above
    `clip_low`, A <= 0 and p < p_prox. The paper takes 0.05 (the preset `dppo_kl`), verl 0.2.
    """
    logprobs_T = batch.logprobs.detach()
    p_T, base_T = logprobs_T.exp(), batch.proximal.exp()
    other_T = torch.log((1 - base_T + _KL_EPS) / (1 - p_T + _KL_EPS))
    kl_T = base_T * (batch.proximal - logprobs_T) + (1 - base_T) * other_T
    # "Not within" instead of "beyond": where a probability above 1 gives no number, it is out.
    is_up_out_T = ~_within(kl_T, clip_high) & (p_T > base_T)
    is_down_out_T = ~_within(kl_T, clip_low) & (p_T < base_T)
    is_out_T = torch.where(batch.advantages > 0, is_up_out_T, is_down_out_T)
    return _masked_reinforce(batch, is_out_T, truncation)


def _masked_reinforce(batch: LossInputs, is_out_T: Tensor, truncation: float) -> LossOutput:
    if truncation <= 0:
        raise ConfigError(f"truncation = {truncation} must be above 0: it bounds a ratio")
    ratio_T = ratio(batch.logprobs - batch.proximal).detach()
    weight_T = ratio_T.clamp(max=truncation) * (~is_out_T).to(ratio_T.dtype)
    return LossOutput(
        loss=-batch.advantages * weight_T * batch.logprobs,
        metrics={
            "clip_fraction": is_out_T.float(),
            "truncated_fraction": (ratio_T > truncation).float(),
            "ratio": ratio_T,
        },
    )


def _beyond(values_T: Tensor, bound: float | None) -> Tensor:
    return torch.zeros_like(values_T, dtype=torch.bool) if bound is None else values_T > bound


def _within(values_T: Tensor, bound: float | None) -> Tensor:
    return torch.ones_like(values_T, dtype=torch.bool) if bound is None else values_T <= bound


@weighted_by_sequence
def gmpo(
    batch: LossInputs, *, clip_low: float | None = 0.2, clip_high: float | None = 0.2
) -> LossOutput:
    """Compute GMPO's loss, -A exp(mean_t d) with clipped d (Zhao et al. 2025, 2507.20673).

    The geometric mean of the ratios of a sequence instead of the arithmetic mean: one outlier does
    not decide it. Each log-ratio d = logp - prox is clipped by itself, s min(s d,
    s clamp(d, -clip_low, clip_high)) with s = sign(A): only the way in which the advantage pushes
    is bounded. A sequence has one advantage, the mean of its tokens', and the batch's loss is the
    mean over sequences (`trainer.aggregation=seq_mean`, which verl's `geo_mean` always takes).
    The bounds are of log-ratios. The paper takes 0.4 (the preset); verl's default is 0.2. Where a
    batch is corrected, a sequence's weight is the geometric mean, too, as in verl.
    """
    log_ratio_T = batch.logprobs - batch.proximal
    low, high = None if clip_low is None else -clip_low, clip_high
    clamped_T = log_ratio_T if low is high is None else log_ratio_T.clamp(low, high)
    sign_T = batch.advantages.sign()
    bounded_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * clamped_T)
    ratio_T = sequence_ratio(bounded_T, batch.sequence_ids)
    advantages_T = sequence_mean(batch.advantages, batch.sequence_ids)
    is_clipped_T = (bounded_T != log_ratio_T) & (sign_T != 0)
    return LossOutput(
        loss=-advantages_T * ratio_T,
        metrics={"clip_fraction": is_clipped_T.float(), "ratio": ratio_T.detach()},
    )


def dro(batch: LossInputs, *, beta: float = 0.1) -> LossOutput:
    """Compute DRO's loss, -(A logp - beta / 2 (logp - prox)^2) (Richemond et al. 2024, 2405.19107).

    Direct reward optimisation: a quadratic penalty takes the place of clips and of importance
    weights; per token the minimum is at logp = prox + A / beta. verl has no default for beta.

    Raises:
        ConfigError: a beta that is not above 0.
    """
    if beta <= 0:
        raise ConfigError(f"beta = {beta} must be above 0: nothing would bound the policy")
    log_ratio_T = batch.logprobs - batch.proximal
    return LossOutput(
        loss=-(batch.logprobs * batch.advantages - beta / 2 * log_ratio_T**2),
        metrics={"ratio": ratio(log_ratio_T).detach()},
    )


def gpg(batch: LossInputs) -> LossOutput:
    """Compute -A logp, the policy gradient without a ratio (Chu et al. 2025, 2504.02546, GPG)."""
    log_ratio_T = (batch.logprobs - batch.proximal).detach()
    return LossOutput(
        loss=-batch.advantages * batch.logprobs, metrics={"ratio": ratio(log_ratio_T)}
    )
