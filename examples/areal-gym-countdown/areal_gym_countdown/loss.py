"""`countdown/vanilla`: a policy loss is a pure function of tensors."""

from __future__ import annotations

from areal_gym.trainer.algorithms.losses import LossInputs, LossOutput

__all__ = ["vanilla"]


def vanilla(batch: LossInputs) -> LossOutput:
    """-A logp per token (Williams 1992): right while nothing is stale."""
    return LossOutput(loss=-batch.advantages * batch.logprobs)
