"""The advantages of a step: shaped rewards, penalties and values in, columns and metrics out."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.config.algorithm_settings import RewardConfig
from areal_gym.trainer.algorithms.advantages import (
    AdvantageEstimator,
    estimate,
    needs_past_mean,
)
from areal_gym.trainer.algorithms.ratios import KL_ESTIMATORS
from areal_gym.trainer.batch.experience import TokenBatch, advantage_inputs
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.critic import Critic
from areal_gym.trainer.row_passes import RowPasses

_NEWEST = 0.1
"""The weight of a step in the running mean of rewards."""


class StepAdvantages:
    """Computes the advantages of each step, and keeps the mean of earlier steps' rewards."""

    def __init__(
        self,
        estimator: AdvantageEstimator,
        config: TrainerConfig,
        passes: RowPasses,
        critic: Critic | None,
        max_new_tokens: int,
    ) -> None:
        self._config = config
        self._estimator = estimator
        self._passes = passes
        self._critic = critic
        self._max_new_tokens = max_new_tokens
        # Not a number before the first step.
        self._past_mean = torch.tensor(math.nan, dtype=torch.float64)

    def states(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint keeps, by name."""
        return {"past_mean": self._past_mean} if needs_past_mean(self._estimator) else {}

    def __call__(
        self, every_row: list[TokenSequence], rows: list[TokenSequence], columns: TokenBatch
    ) -> dict[str, float]:
        """Add advantages, and the critic's targets, to the columns; return metrics."""
        config = self._config
        inputs = advantage_inputs(every_row, config, self._max_new_tokens)
        metrics = {}
        if config.reward != RewardConfig():
            metrics["reward/shaped_mean"] = float(inputs.rewards_G.mean())
        if inputs.teacher_logprobs_T is not None:
            gained_T = inputs.teacher_logprobs_T - columns.all("old").cpu()
            metrics["train/kl_teacher"] = -float(gained_T.mean())
        if "reference" in columns and config.kl.place == "reward":
            kl = KL_ESTIMATORS[config.kl.estimator]
            penalties_T = config.kl.coefficient * kl(columns.all("old"), columns.all("reference"))
            inputs = replace(inputs, penalties_T=penalties_T.to("cpu", torch.float64))
        if self._critic is not None:
            num_trajectories = len(inputs.rewards_G)
            values_T, final_values_G = self._passes.values(rows, self._critic, num_trajectories)
            columns.put("values", values_T)
            inputs = replace(inputs, values_T=values_T.cpu(), final_values_G=final_values_G)
        if not self._past_mean.isnan():
            inputs = replace(inputs, past_mean=self._past_mean.clone())
        result = estimate(self._estimator, inputs, **config.advantage_kwargs)
        is_first = bool(self._past_mean.isnan())
        mean = inputs.rewards_G.mean()
        self._past_mean.copy_(mean if is_first else self._past_mean.lerp(mean, _NEWEST))
        columns.put("advantages", result.advantages_T.float())
        if self._critic is not None and result.returns_T is not None:
            columns.put("returns", result.returns_T.float())
            unexplained = float((result.returns_T - values_T.cpu()).var(correction=0))
            variance = float(result.returns_T.var(correction=0))
            metrics["train/explained_variance"] = 1 - unexplained / max(variance, 1e-12)
        ids_T = inputs.trajectory_ids_T
        num_nonzero = len(ids_T[result.advantages_T != 0].unique())
        metrics["train/zero_advantage"] = 1 - num_nonzero / len(ids_T.unique())
        return metrics
