"""Ratios and divergences of two policies on sampled tokens, [T].

All take log-probabilities of the *sampled* tokens, [T], and give one number per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

KlKind = Literal["k1", "k2", "k3"]

_MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: far beyond every clip, and still finite in float32."""


def ratio(log_ratio: Tensor) -> Tensor:
    """Compute exp(log_ratio) with the exponent clamped to +-20, so that it stays finite."""
    return _held(log_ratio).exp()


def _held(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def clip_ratio(ratio_T: Tensor, clip_low: float | None, clip_high: float | None) -> Tensor:
    """Compute clip(r, 1 - clip_low, 1 + clip_high); None switches a bound off."""
    low = -math.inf if clip_low is None else 1 - clip_low
    high = math.inf if clip_high is None else 1 + clip_high
    return ratio_T.clamp(low, high)


def sequence_mean(values_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Replace each token's value by the mean over its sequence."""
    num_sequences = int(sequence_ids_T.max()) + 1 if len(values_T) else 0
    zeros = torch.zeros(num_sequences, dtype=values_T.dtype, device=values_T.device)
    sums = zeros.index_add(0, sequence_ids_T, values_T)
    counts = zeros.index_add(0, sequence_ids_T, torch.ones_like(values_T))
    return (sums / counts.clamp(min=1))[sequence_ids_T]


def sequence_ratio(log_ratio_T: Tensor, sequence_ids_T: Tensor, *, most: float = 20.0) -> Tensor:
    """Compute exp(mean of a sequence's log-ratios), at most exp(`most`), for each of its tokens.

    The value is the sequence's, and the gradient is the token's own, sg(s) p / sg(p) (Zheng et al.
    2025, eq. 14). Summed over a sequence it is that of the mean; a token that a mask leaves out or
    that has a weight of its own takes its part of the gradient with it.
    """
    mean_T = sequence_mean(log_ratio_T.detach(), sequence_ids_T)
    return ratio((mean_T + (log_ratio_T - log_ratio_T.detach())).clamp(max=most))


def sequence_weights(weights_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Replace each token's weight by the geometric mean of its sequence's, with 1e-10 for 0."""
    return sequence_mean((weights_T + 1e-10).log(), sequence_ids_T).exp()


def k1(logprobs_T: Tensor, base_T: Tensor) -> Tensor:
    """Compute d = logp - base: KL(p || base), unbiased on tokens that p sampled, of either sign.

    Schulman 2020, "Approximating KL Divergence". As a term of the *loss* its gradient is that of
    logp alone, whose mean is zero: it belongs into the reward.
    """
    return logprobs_T - base_T


def k2(logprobs_T: Tensor, base_T: Tensor) -> Tensor:
    """Compute d^2 / 2, which is biased, but whose gradient on p's tokens is that of KL(p || base).

    Schulman 2020; the gradient is d grad(logp).
    """
    return (logprobs_T - base_T) ** 2 / 2


def k3(logprobs_T: Tensor, base_T: Tensor) -> Tensor:
    """Compute exp(-d) - 1 + d for d = logp - base, a nonnegative estimate of KL(p || base).

    Unbiased on tokens that p sampled (Schulman 2020). As a term of the loss (DeepSeekMath, eq. 4)
    its gradient on p's tokens is that of KL(base || p).
    """
    difference_T = logprobs_T - base_T
    # Not ratio - 1: of nearly equal policies that would leave rounding, of either sign.
    return _held(-difference_T).expm1() + difference_T


def adverse_drift(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Compute |A| d^2, where d is how far the ratio r = p / old went against the advantage's sign.

    d = max(0, 1 - r) where A > 0, and max(0, min(r, 2) - 1) where A < 0: both are between 0 and 1.
    Divided by the sum of |A|, it is 0 for a policy that only did what the advantages ask for,
    however far it went, and 1 for one that undid all of it. The square makes it small for engines
    that round differently, half of whose differences go against the sign.
    """
    moved_T = (logprobs_T - old_T).clamp(max=math.log(2)).expm1() * advantages_T.sign()
    return advantages_T.abs() * moved_T.clamp(max=0) ** 2


def binary_kl(logprobs_T: Tensor, base_T: Tensor) -> Tensor:
    """Compute the KL of two coins, "this token" against "any other", with probabilities p and base.

    p log(p / base) + (1 - p) log((1 - p) / (1 - base)): a lower bound of the KL over the vocabulary
    (data processing inequality), known without the rest of the distribution.
    """
    eps = torch.finfo(logprobs_T.dtype).eps
    p_T = logprobs_T.exp().clamp(eps, 1 - eps)
    base_p_T = base_T.exp().clamp(eps, 1 - eps)
    other_T = (1 - p_T) * ((1 - p_T) / (1 - base_p_T)).log()
    return p_T * (p_T / base_p_T).log() + other_T


KL_ESTIMATORS: Mapping[KlKind, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
