"""Direct preference optimisation (DPO): makes the preferred answer of two likelier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.batch.examples import Example
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.objectives.supervised import Freeze, Judgement, Objective


def preference_loss(
    margin_P: Tensor, *, kind: Literal["sigmoid", "ipo"] = "sigmoid", beta: float = 0.1
) -> Tensor:
    """Compute the loss of each pair from its margin, [P] -> [P].

    The margin is h = (log p(c) - log ref(c)) - (log p(r) - log ref(r)): how much more the chosen
    row has gained over the reference than the rejected one. The log-probability of a row is the sum
    over its tokens for sigmoid, and their mean for ipo.

    - sigmoid: -log sigmoid(beta h) (Rafailov et al. 2023, eq. 7);
    - ipo: (h - 1 / (2 beta))^2 (Azar et al. 2023, eq. 17; their tau is beta), which aims at a fixed
      margin instead of pushing ever further. Means are how the authors compute it, as TRL was told.
    """
    if kind == "ipo":
        return (margin_P - 1 / (2 * beta)) ** 2
    return -F.logsigmoid(beta * margin_P)


def is_preferred(margin_P: Tensor) -> Tensor:
    """Return 1 where the chosen row is ahead, 0 where it is behind, 0.5 where they are equal."""
    return (margin_P.detach().sign() + 1) / 2


def judged_pairs(loss_P: Tensor, margin_P: Tensor, scores_P2: Tensor) -> Judgement:
    """Return pairs' losses, with metrics of the scores of their chosen and rejected rows."""
    accuracy_P, (chosen_P, rejected_P) = is_preferred(margin_P), scores_P2.unbind(1)
    metrics = {"margin": margin_P, "chosen": chosen_P, "rejected": rejected_P}
    return Judgement(loss_U=loss_P, metrics={"accuracy": accuracy_P, **metrics})


class Dpo(Objective):
    """Applies `preference_loss` to pairs; an example is the chosen row and the rejected row.

    Metrics: `accuracy` (`is_preferred`), `margin` (beta h), and `chosen` and `rejected`, beta times
    each row's gain over the reference (with ipo, per token). `reference` is the frozen policy or
    its directory.

    Raises:
        ConfigError: beta is not above 0.
    """

    def __init__(
        self,
        reference: PolicyModel | Path,
        *,
        kind: Literal["sigmoid", "ipo"] = "sigmoid",
        beta: float = 0.1,
    ) -> None:
        if beta <= 0:
            raise ConfigError(f"beta = {beta} must be above 0: nothing would be learned")
        self._reference = reference
        self._kind = kind
        self._beta = beta

    def prepare(self, freeze: Freeze) -> None:
        """Load the reference."""
        self._reference = freeze(self._reference)

    def num_units(self, example: Example) -> int:
        """Return 1: a pair has one loss."""
        return 1

    def __call__(
        self, decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]
    ) -> Judgement:
        """Compute the loss and metrics of each pair."""
        gained_P2 = row_logprobs(decoder, batch, examples) - self._reference_logprobs(
            batch, examples
        )
        if self._kind == "ipo":
            gained_P2 = gained_P2 / row_lengths(examples).to(gained_P2.device)
        margin_P = gained_P2[:, 0] - gained_P2[:, 1]
        loss_P = preference_loss(margin_P, kind=self._kind, beta=self._beta)
        return judged_pairs(loss_P, self._beta * margin_P, self._beta * gained_P2)

    @torch.no_grad()
    def _reference_logprobs(self, batch: PackedBatch, examples: Sequence[Example]) -> Tensor:
        # Computed again in each epoch: several ranks must make the same passes.
        assert isinstance(self._reference, PolicyModel)
        return row_logprobs(self._reference, batch, examples)


def row_lengths(examples: Sequence[Example]) -> Tensor:
    """Return the number of marked tokens of each row, at least 1, [P, rows per example]."""
    return torch.tensor([[max(row.num_marked, 1) for row in pair] for pair in examples])


def row_logprobs(decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]) -> Tensor:
    """Return the summed log-probability of the marked tokens of each row, [P, rows per example]."""
    rows = [row for pair in examples for row in pair]
    scores = score_tokens(decoder, batch, [row.mask for row in rows])
    parts = torch.split(scores.logprobs, [row.num_marked for row in rows])
    return torch.stack([part.sum() for part in parts]).view(len(examples), -1)
