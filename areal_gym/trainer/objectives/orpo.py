"""Odds-ratio preference optimisation (ORPO): imitation and preference without a reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.batch.examples import Example
from areal_gym.trainer.objectives.dpo import judged_pairs, row_lengths, row_logprobs
from areal_gym.trainer.objectives.supervised import Judgement, Objective


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """Compute log(p / (1 - p)) from log p, the mean log-probability of a row's tokens."""
    # 1 - p without cancellation where p is near 1.
    return mean_logprobs - torch.log(-torch.expm1(mean_logprobs.clamp(max=-1e-7)))


class Orpo(Objective):
    """Applies the ORPO loss: -log p(chosen) per token - weight * log sigmoid(log odds ratio).

    Hong et al. 2024 (2403.07691), eq. 6 and 7. The odds are those of a row's geometric mean
    probability, p = exp(mean log p(y_t)). An example is the chosen row and the rejected row.

    Metrics: `accuracy` (the chosen row has the higher odds), `margin` (the log odds ratio), and
    `chosen` and `rejected`, the mean log-probabilities.

    Raises:
        ConfigError: the weight is not above 0.
    """

    def __init__(self, *, weight: float = 0.1) -> None:
        if weight <= 0:
            raise ConfigError(f"weight = {weight} must be above 0: that would be sft of one side")
        self._weight = weight

    def num_units(self, example: Example) -> int:
        """Return 1: a pair has one loss."""
        return 1

    def __call__(
        self, decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]
    ) -> Judgement:
        """Compute the loss and metrics of each pair."""
        sums_P2 = row_logprobs(decoder, batch, examples)
        means_P2 = sums_P2 / row_lengths(examples).to(sums_P2.device)
        odds_P2 = log_odds(means_P2)
        margin_P = odds_P2[:, 0] - odds_P2[:, 1]
        loss_P = -means_P2[:, 0] - self._weight * F.logsigmoid(margin_P)
        return judged_pairs(loss_P, margin_P, means_P2)
