"""Supervised fine-tuning: the dialogue's own tokens become likelier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.batch.examples import Example
from areal_gym.trainer.batch.packing import PackedBatch
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.objectives.supervised import Judgement, Objective


class Sft(Objective):
    """-log p(y_t | before) of each marked token; a batch's loss is the mean over its tokens.

    Maximum likelihood, as in Ouyang et al. 2022 (InstructGPT), section 3.5. An example is one row.

    Metrics: `accuracy`, the share of tokens than which none is likelier; `exact`, the share of
    examples in which all tokens are such.
    """

    def num_units(self, example: Example) -> int:
        """Return the number of its marked tokens."""
        return sum(row.num_marked for row in example)

    def __call__(
        self, decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]
    ) -> Judgement:
        """Judge each marked token."""
        masks = [row.mask for rows in examples for row in rows]
        scores = score_tokens(decoder, batch, masks)
        is_right_T = scores.is_likeliest
        lengths = [self.num_units(example) for example in examples]
        return Judgement(
            loss_U=-scores.logprobs,
            metrics={
                "accuracy": is_right_T,
                "exact": torch.stack([part.all() for part in torch.split(is_right_T, lengths)]),
            },
        )
