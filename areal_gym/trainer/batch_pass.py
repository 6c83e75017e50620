"""Selects tokens among all of an update, for losses that need it (`losses.with_batch_pass`)."""

from __future__ import annotations

import torch

from areal_gym.trainer.algorithms.token_loss import Proximal, TokenLoss
from areal_gym.trainer.row_passes import RowPasses
from areal_gym.trainer.step_stats import Step


def pick_tokens(
    token_loss: TokenLoss,
    passes: RowPasses,
    step: Step,
    members: list[int],
    proximal: Proximal,
    *,
    is_first: bool,
) -> None:
    """Write the loss's selection among the tokens of the rows `members` into the step's columns.

    All ranks select the same tokens. The policy's log-probabilities are mostly known before the
    first update of a step; before later updates they take a forward pass of these rows.
    """
    columns = step.columns
    is_fresh = bool((columns.take("versions", members) == step.version).all())
    if is_first and step.proximal == "scored":
        logprobs_T = columns.take("proximal", members)
    elif is_first and is_fresh and proximal == "recorded":
        logprobs_T = columns.take("old", members)
    else:
        logprobs_T = torch.cat(passes.logprobs(step.rows, members=members))
    picked_T = token_loss.pick(
        logprobs_T, columns, members, proximal=proximal, version=step.version
    )
    columns.put_rows("picked", members, picked_T)
