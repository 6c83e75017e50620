"""The advantages of a step: shaped rewards, penalties and values in, columns and metrics out."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.config.algorithm_settings import RewardConfig
from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.advantages import (
    AdvantageEstimator,
    AdvantageInputs,
    estimate,
    needs_past_mean,
    needs_roles,
)
from areal_gym.trainer.algorithms.ratios import KL_ESTIMATORS
from areal_gym.trainer.algorithms.token_advantages import turns_of
from areal_gym.trainer.batch.experience import TokenBatch, advantage_inputs
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.critic import Critic
from areal_gym.trainer.row_passes import RowPasses

_NEWEST = 0.1
"""The weight of a step in the running mean of rewards."""
_ROLE_DECAY = 0.95
"""The weight of the old mean of a role's rewards against one trajectory's (SPIRAL)."""
_MAX_ROLES = 64


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
        self._role_ids = torch.zeros(_MAX_ROLES, dtype=torch.int64)
        """A number made from each role's name; 0 where there is no role yet."""
        self._role_means = torch.zeros(_MAX_ROLES, dtype=torch.float64)

    def states(self) -> dict[str, Tensor]:
        """Return the live tensors that a checkpoint keeps, by name."""
        states = {}
        if needs_past_mean(self._estimator):
            states["past_mean"] = self._past_mean
        if needs_roles(self._estimator):
            states |= {"role_ids": self._role_ids, "role_means": self._role_means}
        return states

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
        if needs_roles(self._estimator):
            heads = [row for row in every_row if row.branch == 0]
            role_means_G = self._move_role_means([row.role for row in heads], inputs.rewards_G)
            inputs = replace(inputs, role_means_G=role_means_G)
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
        if inputs.state_ids_T is not None:
            metrics["train/anchored_fraction"] = _anchored_fraction(inputs)
        ids_T = inputs.trajectory_ids_T  # ascending, so that nothing needs to be sorted
        num_nonzero = len(ids_T[result.advantages_T != 0].unique_consecutive())
        metrics["train/zero_advantage"] = 1 - num_nonzero / len(ids_T.unique_consecutive())
        return metrics

    def _move_role_means(self, roles: Sequence[str], rewards_G: Tensor) -> Tensor:
        """Move the running mean of each role by its rewards; return each trajectory's, [G].

        n moves by the mean of n rewards are one by 0.95^n: their order does not matter.
        """
        slots_G = torch.tensor([self._role_slot(role) for role in roles])
        for slot in slots_G.unique().tolist():
            rewards = rewards_G[slots_G == slot]
            newest = 1 - _ROLE_DECAY ** len(rewards)
            self._role_means[slot] += newest * (rewards.mean() - self._role_means[slot])
        return self._role_means[slots_G]

    def _role_slot(self, role: str) -> int:
        number = 1 + zlib.crc32(role.encode())
        for slot, known in enumerate(self._role_ids.tolist()):
            if known in (0, number):
                self._role_ids[slot] = number
                return slot
        raise ConfigError(
            f"trainer.advantage=rae keeps means of {_MAX_ROLES} roles, and the tasks have more",
            hints=['data["role"] of a task names a seat at the game, not an episode'],
        )


def _anchored_fraction(inputs: AdvantageInputs) -> float:
    """Return the share of turns that began in a state in which another turn began, too."""
    assert inputs.state_ids_T is not None
    _, first_K = turns_of(inputs.trajectory_ids_T, inputs.turn_ids_T)
    state_ids_K = inputs.state_ids_T[first_K]
    _, index_K, counts = state_ids_K.unique(return_inverse=True, return_counts=True)
    return float(((counts[index_K] > 1) & (state_ids_K >= 0)).float().mean())
