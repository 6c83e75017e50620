"""The decoupled objective: constant weights for tokens that an older policy sampled.

loss = w * policy_loss(logp, prox), w = exp(prox - old) (Fu et al. 2025, AReaL, eq. 5): the policy
loss keeps the new policy near the proximal one, w makes up for the tokens' age. A masked token has
weight 0 and stays in the divisor: the others keep the scale.

All tensors are [T], T the policy tokens of the whole batch; results carry no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal_gym.config.algorithm_settings import check_correction
from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.ratios import binary_kl, k2, k3, ratio, sequence_mean

Level = Literal["token", "sequence"]
Action = Literal["truncate", "mask"]
Measure = Literal["ratio", "k1", "k2", "k3", "binary_kl"]
Statistic = Literal["mean", "sum", "max"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Weights [T], and per-token metrics [T] whose token mean is logged."""

    weights: Tensor
    metrics: Mapping[str, Tensor]


def correct(
    proximal_T: Tensor,
    old_logprobs_T: Tensor,
    sequence_ids_T: Tensor,
    *,
    level: Level = "token",
    action: Action = "truncate",
    upper: float | None = 5.0,
    lower: float | None = None,
    measure: Measure = "ratio",
    statistic: Statistic = "mean",
) -> Correction:
    """Compute importance weights of stale tokens, truncated or masked outside [lower, upper].

    Token truncate is the default; settings give the other variants of the literature:

        token truncate     upper=5.0 (Yao et al. 2025, truncated importance sampling)
        token mask         action="mask"
        band mask          action="mask", lower=0.5, upper=5.0 (Ring-1T 2025, IcePop)
        sequence truncate  level="sequence"
        sequence mask      level="sequence", action="mask" (Liu et al. 2025, "When Speed Kills
                           Stability"; here by the geometric mean)

    Sequence ids are 0-based, without gaps. `level="sequence"` gives all tokens of a sequence the
    geometric mean of their weights, and one measure. Outside of the bounds (None: no bound),
    `truncate` uses the nearer bound as weight, and `mask` 0. `measure` is the bounded value: the
    weight w itself, or for masks a divergence of log w = prox - old: k1 = log w,
    k2 = (log w)^2 / 2, k3 = w - 1 - log w (unbiased for KL(old || prox)), `binary_kl` that of "this
    token" against "any other". `statistic` combines the tokens of a sequence: the mean of ratios is
    their geometric mean, the sum their product, which grows with the length.

    Raises:
        ConfigError: bounds that hold nothing, or settings that contradict each other.
    """
    check_correction(level, action, upper, lower, measure, statistic)
    proximal_T, old_logprobs_T = proximal_T.detach(), old_logprobs_T.detach()
    log_weight_T = proximal_T - old_logprobs_T
    divergences = {
        "k1": log_weight_T,
        "k2": k2(old_logprobs_T, proximal_T),
        "k3": k3(old_logprobs_T, proximal_T),
        "binary_kl": binary_kl(old_logprobs_T, proximal_T),
    }
    measured_T = log_weight_T if measure == "ratio" else divergences[measure]
    if level == "sequence":
        log_weight_T = sequence_mean(log_weight_T, sequence_ids_T)
        measured_T = _over_sequences(measured_T, sequence_ids_T, statistic)
    if measure == "ratio":
        measured_T = ratio(measured_T)
    weights_T = ratio(log_weight_T)
    low, high = -math.inf if lower is None else lower, math.inf if upper is None else upper
    is_outside_T = (measured_T > high) | (measured_T < low)
    if action == "mask":
        corrected_T = weights_T.masked_fill(is_outside_T, 0.0)
    else:
        corrected_T = weights_T.clamp(min=low, max=high)
    return Correction(
        weights=corrected_T,
        metrics={
            "stale_weight": corrected_T,
            "corrected_fraction": is_outside_T.to(corrected_T.dtype),
            "stale_ratio": weights_T,
            **{f"stale_{name}": values_T for name, values_T in divergences.items()},
        },
    )


def second_moment_mask(
    proximal_T: Tensor, old_logprobs_T: Tensor, *, threshold: float = 0.04
) -> Tensor:
    """Compute M2PO's mask: 0 for the tokens furthest from the old policy (Zheng et al. 2025).

    The tokens with the largest (old - prox)^2 go, until the mean of the rest is within `threshold`.
    The divisor of the loss stays that of all tokens. It needs the whole batch: whether a token goes
    depends on all others. Equal tokens go together, so that order does not matter. Where even the
    closest token is beyond the threshold nothing is kept.
    """
    if threshold <= 0:
        raise ConfigError(f"threshold = {threshold} must be above 0")
    squares_T = ((old_logprobs_T - proximal_T).detach() ** 2).double()
    ascending_T = squares_T.sort().values
    counts_T = torch.arange(1, len(squares_T) + 1, device=squares_T.device)
    # The running mean of ascending numbers never falls: all that come after the last good one go.
    num_kept = int((ascending_T.cumsum(0) / counts_T <= threshold).sum())
    if num_kept == len(squares_T):
        return torch.ones_like(proximal_T)
    return (squares_T < ascending_T[num_kept]).to(proximal_T.dtype)


def interpolate_proximal(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    versions_T: Tensor,
    *,
    proximal_version: int,
    current_version: int,
    kind: Literal["loglinear", "linear"] = "loglinear",
) -> Tensor:
    """Interpolate proximal log-probabilities between the old and the current policy.

    alpha = (proximal_version - v) / (current_version - v) for a token that version v sampled:

        loglinear  old + alpha (logp - old)
        linear     log((1 - alpha) exp(old) + alpha exp(logp))

    A token that is no older than the proximal policy keeps its recorded log-probability.

    Raises:
        ConfigError: `proximal_version` is not before `current_version`.
    """
    if proximal_version >= current_version:
        raise ConfigError(
            f"proximal_version = {proximal_version} must come before "
            f"current_version = {current_version}"
        )
    logprobs_T, old_logprobs_T = logprobs_T.detach(), old_logprobs_T.detach()
    age_T = (current_version - versions_T).clamp(min=1)
    alpha_T = ((proximal_version - versions_T).clamp(min=0) / age_T).to(logprobs_T.dtype)
    if kind == "loglinear":
        between_T = old_logprobs_T + alpha_T * (logprobs_T - old_logprobs_T)
    else:
        between_T = torch.logaddexp(
            torch.log1p(-alpha_T) + old_logprobs_T, alpha_T.log() + logprobs_T
        )
    return torch.where(alpha_T > 0, between_T, old_logprobs_T)


def _over_sequences(values_T: Tensor, sequence_ids_T: Tensor, statistic: Statistic) -> Tensor:
    if statistic == "mean":
        return sequence_mean(values_T, sequence_ids_T)
    num_sequences = int(sequence_ids_T.max()) + 1 if len(values_T) else 0
    reduced = torch.zeros(num_sequences, dtype=values_T.dtype, device=values_T.device)
    how = "sum" if statistic == "sum" else "amax"
    return reduced.scatter_reduce(0, sequence_ids_T, values_T, how, include_self=False)[
        sequence_ids_T
    ]
