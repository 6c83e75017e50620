"""Policy losses: pure functions of tensors over the policy's tokens; lower is better.

All tensors are [T], T the policy tokens of a micro-batch. A loss gives one number per token; their
weights (`aggregation_weights`) are those of the whole batch, so that neither micro-batches nor
ranks change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.ratios import clip_ratio, ratio, sequence_mean, sequence_ratio

__all__ = [
    "Aggregation",
    "LossInputs",
    "LossOutput",
    "PolicyLoss",
    "aggregate",
    "aggregation_weights",
    "batch_pass",
    "cispo",
    "gspo",
    "has_sequence_weights",
    "ppo_clip",
    "sapo",
    "value_loss",
    "weighted_by_sequence",
    "with_batch_pass",
]

Aggregation = Literal["token_mean", "seq_mean", "constant_length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """The inputs of a policy loss; every tensor is [T]."""

    logprobs: Tensor
    """Log-probabilities under the policy being trained; carries the gradient."""
    proximal: Tensor
    """Log-probabilities under the policy at the start of the step, the base of ratios."""
    old_logprobs: Tensor
    """Log-probabilities recorded while sampling; equal to `proximal` when nothing is stale."""
    advantages: Tensor
    sequence_ids: Tensor
    """The sequence of each token, 0-based, without gaps."""
    picked: Tensor | None = None
    """The tokens that the loss's batch pass has picked, bool; None without such a pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """Per-token losses [T], and per-token metrics [T] whose token mean is logged."""

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[..., LossOutput]
BatchPass = Callable[..., Tensor]
"""Picks tokens [T], bool, from the inputs of a whole update, with the settings of its loss."""


def with_batch_pass(look: BatchPass) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorate a loss that treats some tokens in another way, depending on all tokens of an update.

    The trainer calls `look` once before the micro-batches of an update, without gradient, with the
    tokens of all micro-batches and ranks; the loss gets each token's part as `LossInputs.picked`.
    That costs a forward pass where the policy's log-probabilities are not known already: only
    losses with such a pass pay for it. A loss that is called without `picked` calls `look` itself.
    """

    def mark(loss: PolicyLoss) -> PolicyLoss:
        loss.batch_pass = look  # type: ignore[attr-defined]
        return loss

    return mark


def batch_pass(loss: PolicyLoss) -> BatchPass | None:
    """Return the pass over all tokens of an update that the loss needs; None for most losses."""
    look: BatchPass | None = getattr(loss, "batch_pass", None)
    return look


def weighted_by_sequence(loss: PolicyLoss) -> PolicyLoss:
    """Decorate a loss whose sequences have one weight: the geometric mean of their tokens'."""
    loss.has_sequence_weights = True  # type: ignore[attr-defined]
    return loss


def has_sequence_weights(loss: PolicyLoss) -> bool:
    """Return whether the loss is decorated with `weighted_by_sequence`."""
    return bool(getattr(loss, "has_sequence_weights", False))


def ppo_clip(
    batch: LossInputs,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.28,
    dual_clip: float | None = None,
) -> LossOutput:
    """Compute PPO's clipped loss (Schulman et al. 2017, eq. 7).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), with the ratio r = exp(logp - prox).
    Different bounds are DAPO's clip-higher (Yu et al. 2025); None switches a bound off. `dual_clip`
    c > 1 bounds the loss of negative advantages by -c A (Ye et al. 2020, eq. 5).
    """
    ratio_T = ratio(batch.logprobs - batch.proximal)
    clipped = _clipped(batch.advantages, ratio_T, clip_low, clip_high)
    if dual_clip is None:
        return clipped
    if dual_clip <= 1:
        raise ConfigError(f"dual_clip = {dual_clip} must be above 1; null switches it off")
    bound_T = -dual_clip * batch.advantages
    is_bounded_T = (batch.advantages < 0) & (bound_T < clipped.loss)
    return LossOutput(
        loss=torch.where(is_bounded_T, bound_T, clipped.loss),
        metrics={**clipped.metrics, "dual_clip_fraction": is_bounded_T.float()},
    )


def gspo(
    batch: LossInputs,
    *,
    clip_low: float | None = 3e-4,
    clip_high: float | None = 4e-4,
    level: Literal["sequence", "token"] = "sequence",
) -> LossOutput:
    """Compute ppo_clip with one ratio per sequence (Zheng et al. 2025, eq. 7).

    The ratio is exp(mean_t(logp - prox)), at most exp(10) as in verl; each token has its own part
    of the gradient (`sequence_ratio`). A sequence has one advantage, the mean of its tokens'. With
    `seq_mean` it is the paper's objective; with `token_mean` long sequences count more.

    `level="token"` is the paper's GSPO-token (eq. 13 and 14), for advantages that differ within a
    sequence: each token has its own. Where they are equal, both levels are the same.
    """
    ratio_T = sequence_ratio(batch.logprobs - batch.proximal, batch.sequence_ids, most=10.0)
    advantages_T = batch.advantages
    if level == "sequence":
        advantages_T = sequence_mean(advantages_T, batch.sequence_ids)
    return _clipped(advantages_T, ratio_T, clip_low, clip_high)


def _clipped(
    advantages_T: Tensor, ratio_T: Tensor, clip_low: float | None, clip_high: float | None
) -> LossOutput:
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * clip_ratio(ratio_T, clip_low, clip_high)
    return LossOutput(
        loss=torch.maximum(plain_T, clipped_T),
        metrics={"clip_fraction": (clipped_T > plain_T).float(), "ratio": ratio_T.detach()},
    )


def cispo(
    batch: LossInputs, *, clip_low: float | None = None, clip_high: float | None = 4.0
) -> LossOutput:
    """Compute -sg(clip(r, 1 - low, 1 + high)) A logp, which drops no token (MiniMax-M1, eq. 4)."""
    ratio_T = ratio(batch.logprobs - batch.proximal).detach()
    weight_T = clip_ratio(ratio_T, clip_low, clip_high)
    return LossOutput(
        loss=-weight_T * batch.advantages * batch.logprobs,
        metrics={"clip_fraction": (weight_T != ratio_T).float(), "ratio": ratio_T},
    )


def sapo(
    batch: LossInputs,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    level: Literal["token", "sequence"] = "token",
) -> LossOutput:
    """Compute -A (4 / tau) sigmoid(tau (r - 1)), a soft gate (Gao et al. 2025, SAPO).

    tau is `tau_positive` where A > 0, else `tau_negative`; a larger one closes faster. The gate's
    slope at r = 1 is 1, so that on policy the gradient is REINFORCE's. `level="sequence"` gates
    GSPO's ratio of the whole sequence, which then has one advantage: the mean of its tokens'.

    Raises:
        ConfigError: a tau that is not above 0.
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ConfigError(
            f"tau_positive = {tau_positive}, tau_negative = {tau_negative}: both must be above 0"
        )
    log_ratio_T, advantages_T = batch.logprobs - batch.proximal, batch.advantages
    if level == "sequence":
        ratio_T = sequence_ratio(log_ratio_T, batch.sequence_ids)
        advantages_T = sequence_mean(advantages_T, batch.sequence_ids)
    else:
        ratio_T = ratio(log_ratio_T)
    tau_T = torch.where(advantages_T > 0, tau_positive, tau_negative).to(ratio_T.dtype)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1))
    slope_T = 4 * gate_T * (1 - gate_T)
    return LossOutput(
        loss=-advantages_T * 4 / tau_T * gate_T,
        metrics={"gate_slope": slope_T.detach(), "ratio": ratio_T.detach()},
    )


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float | None = 0.2
) -> Tensor:
    """Compute max((V - R)^2, (clip(V, old +- clip) - R)^2) / 2 per token.

    Schulman et al. 2017 (PPO), in the form of the authors' code; None switches the clip off.
    `old_values_T` are the critic's at the start of the step.
    """
    plain_T = (values_T - returns_T) ** 2
    if clip is None:
        return plain_T / 2
    clipped_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    return torch.maximum(plain_T, (clipped_T - returns_T) ** 2) / 2


def aggregation_weights(
    kind: Aggregation, lengths: list[int], *, constant_length: int = 1
) -> list[float]:
    """Return the weight of each sequence's tokens, for all sequences of the batch.

    Args:
        kind: `token_mean`: every token counts the same; `seq_mean`: every sequence counts the
            same; `constant_length`: token sums over sequences times a constant (Dr. GRPO).
        lengths: policy tokens of each sequence of the *whole* batch.
        constant_length: the constant, such as the limit of new tokens.
    """
    if kind == "token_mean":
        return [1 / max(sum(lengths), 1)] * len(lengths)
    num_sequences = max(sum(length > 0 for length in lengths), 1)
    if kind == "seq_mean":
        return [1 / (max(length, 1) * num_sequences) for length in lengths]
    return [1 / (constant_length * num_sequences)] * len(lengths)


def aggregate(loss_T: Tensor, weights_T: Tensor) -> Tensor:
    """Compute the part of the batch's loss of these tokens; parts add up over micro-batches."""
    return (loss_T * weights_T).sum()
