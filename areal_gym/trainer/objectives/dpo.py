"""Direct preference optimisation: the preferred answer becomes likelier than the other one."""

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
    """Compute the loss of each pair from its margin [P].

    h = (log p(c) - log ref(c)) - (log p(r) - log ref(r)), with log-probabilities of whole rows, is
    how much more the chosen row has gained on the reference:

    - sigmoid: -log sigmoid(beta h) (Rafailov et al. 2023, eq. 7);
    - ipo: (h - 1 / (2 beta))^2 (Azar et al. 2023, eq. 17; their tau is beta), which stops at a
      margin instead of pushing ever further.
    """
    if kind == "ipo":
        return (margin_P - 1 / (2 * beta)) ** 2
    return -F.logsigmoid(beta * margin_P)


def is_preferred(margin_P: Tensor) -> Tensor:
    """Return 1 where the chosen row is ahead, 0 where it is behind, 0.5 where both are equal."""
    return (margin_P.detach().sign() + 1) / 2


def judged_pairs(loss_P: Tensor, margin_P: Tensor, scores_P2: Tensor) -> Judgement:
    """Return the losses of pairs, and the metrics of the scores of what was chosen and rejected."""
    accuracy_P, (chosen_P, rejected_P) = is_preferred(margin_P), scores_P2.unbind(1)
    metrics = {"margin": margin_P, "chosen": chosen_P, "rejected": rejected_P}
    return Judgement(loss_U=loss_P, metrics={"accuracy": accuracy_P, **metrics})


class Dpo(Objective):
    """`preference_loss` of pairs; an example is the chosen row and the rejected row.

    Metrics: `accuracy` (`is_preferred`), `margin` (beta h), and `chosen` and `rejected`, beta times
    what the policy has gained on the reference in each. `reference` is the frozen policy, or its
    checkpoint directory.

    Raises:
        ConfigError: a beta that is not above 0.
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
        """Judge each pair."""
        gained_P2 = row_logprobs(decoder, batch, examples) - self._referred(batch, examples)
        margin_P = gained_P2[:, 0] - gained_P2[:, 1]
        loss_P = preference_loss(margin_P, kind=self._kind, beta=self._beta)
        return judged_pairs(loss_P, self._beta * margin_P, self._beta * gained_P2)

    @torch.no_grad()
    def _referred(self, batch: PackedBatch, examples: Sequence[Example]) -> Tensor:
        # Scored anew in each epoch: several ranks must all do so in the same passes.
        assert isinstance(self._reference, PolicyModel)
        return row_logprobs(self._reference, batch, examples)


def row_logprobs(decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]) -> Tensor:
    """Return the log-probability of what is marked in each row of each example, [P, rows]."""
    rows = [row for pair in examples for row in pair]
    scores = score_tokens(decoder, batch, [row.mask for row in rows])
    parts = torch.split(scores.logprobs, [row.num_marked for row in rows])
    return torch.stack([part.sum() for part in parts]).view(len(examples), -1)
