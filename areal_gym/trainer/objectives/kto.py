"""Kahneman-Tversky optimisation (KTO): learns from good and bad answers that are not paired."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.batch.examples import Example, pack_examples
from areal_gym.trainer.objectives.dpo import row_logprobs
from areal_gym.trainer.objectives.supervised import Freeze, Judgement, Objective


def kto_loss(
    gained_P: Tensor,
    baseline: float,
    is_desirable_P: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Compute the loss of each answer from its gain over the reference, [P] -> [P].

    Ethayarajh et al. 2024 (2402.01306), eq. 7 and 8, with r = log p(y) - log ref(y) and z0 the
    `baseline`: desirable_weight (1 - sigmoid(beta (r - z0))) for a good answer and
    undesirable_weight (1 - sigmoid(beta (z0 - r))) for a bad one.
    """
    sign_P = torch.where(is_desirable_P, 1.0, -1.0)
    weight_P = torch.where(is_desirable_P, desirable_weight, undesirable_weight)
    return weight_P * (1 - torch.sigmoid(sign_P * beta * (gained_P - baseline)))


class Kto(Objective):
    """Applies `kto_loss` to labelled answers.

    An example is an answer, and its prompt with the answer to another prompt. z0 is the constant
    max(0, mean of log p - log ref over the batch's second rows): the paper's estimate of
    KL(p || ref). It takes a pass without gradient before each batch.

    Metrics: `accuracy` (good answers above z0 and bad ones below), `gained` (beta r), `baseline`
    (z0). `reference` is the frozen policy or its checkpoint directory.

    Raises:
        ConfigError: beta is not above 0.
    """

    has_batch_mean = True

    def __init__(
        self,
        reference: PolicyModel | Path,
        *,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
    ) -> None:
        if beta <= 0:
            raise ConfigError(f"beta = {beta} must be above 0: nothing would be learned")
        self._reference = reference
        self._beta = beta
        self._weights = (desirable_weight, undesirable_weight)

    def prepare(self, freeze: Freeze) -> None:
        """Load the reference."""
        self._reference = freeze(self._reference)

    def num_units(self, example: Example) -> int:
        """Return 1: an answer has one loss."""
        return 1

    def batch_values(
        self, decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]
    ) -> Tensor:
        """Return the gains over the reference of the answers to other prompts, [P]."""
        return self._gained(decoder, [(rows[1],) for rows in examples], batch)

    def __call__(
        self, decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]
    ) -> Judgement:
        """Compute the loss and metrics of each answer."""
        gained_P = self._gained(decoder, [(rows[0],) for rows in examples], batch)
        baseline = max(0.0, self.batch_mean)
        is_good_P = torch.tensor([rows[0].is_desirable for rows in examples]).to(gained_P.device)
        loss_P = kto_loss(
            gained_P,
            baseline,
            is_good_P,
            beta=self._beta,
            desirable_weight=self._weights[0],
            undesirable_weight=self._weights[1],
        )
        return Judgement(
            loss_U=loss_P,
            metrics={
                "accuracy": ((gained_P > baseline) == is_good_P).float(),
                "gained": self._beta * gained_P,
                "baseline": torch.full_like(gained_P, baseline),
            },
        )

    def _gained(
        self, decoder: PolicyModel, examples: Sequence[Example], packed: PackedBatch
    ) -> Tensor:
        batch = pack_examples(examples, packed.token_ids_N.device)
        with torch.no_grad():
            assert isinstance(self._reference, PolicyModel)
            reference_P = row_logprobs(self._reference, batch, examples)
        return (row_logprobs(decoder, batch, examples) - reference_P).squeeze(1)
