"""Computes the advantages of a step from rewards, penalties and values."""

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
from areal_gym.trainer.algorithms.advantage_inputs import (
    NO_PARTS,
    AdvantageInputs,
    TrajectoryInputs,
)
from areal_gym.trainer.algorithms.advantages import (
    AdvantageEstimator,
    estimate,
    estimate_trajectories,
    needs_past_mean,
    needs_roles,
    takes_tokens,
)
from areal_gym.trainer.algorithms.ratios import KL_ESTIMATORS
from areal_gym.trainer.algorithms.token_advantages import turns_of
from areal_gym.trainer.batch.experience import (
    TokenBatch,
    advantage_inputs,
    has_state_keys,
    trajectory_inputs,
)
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.critic import Critic
from areal_gym.trainer.row_passes import RowPasses

_PAST_MEAN_WEIGHT = 0.1
"""The weight of a step in the running mean of rewards."""
_ROLE_DECAY = 0.95
"""The weight of a role's old mean reward when one trajectory is added (SPIRAL, 2506.24119)."""
_MAX_ROLES = 64


class StepAdvantages:
    """Computes the advantages of each step, and keeps running means of earlier steps' rewards."""

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
        # NaN before the first step.
        self._past_mean = torch.tensor(math.nan, dtype=torch.float64)
        self._role_ids = torch.zeros(_MAX_ROLES, dtype=torch.int64)
        """A number made from each role's name; 0 in slots without a role."""
        self._role_means = torch.zeros(_MAX_ROLES, dtype=torch.float64)
        self._part_names: dict[str, None] = {}
        """The reward parts of earlier steps: one that no episode of a batch has is 0 there."""

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
        """Write advantages and the critic's targets into the columns; return metrics.

        `every_row` includes rows without a token to train on, whose rewards count; `rows` does not.
        """
        config = self._config
        make_inputs = advantage_inputs if self._needs_tokens(rows, columns) else trajectory_inputs
        inputs = self._with_past(make_inputs(every_row, config, self._max_new_tokens), every_row)
        metrics = {}
        if config.reward != RewardConfig():
            metrics["reward/shaped_mean"] = float(inputs.rewards_G.mean())
        if isinstance(inputs, AdvantageInputs):
            metrics |= self._put_per_token(inputs, rows, columns)
        else:
            metrics |= self._put_per_trajectory(inputs, rows, columns)
        is_first = bool(self._past_mean.isnan())
        mean = inputs.rewards_G.mean()
        new_mean = mean if is_first else self._past_mean.lerp(mean, _PAST_MEAN_WEIGHT)
        self._past_mean.copy_(new_mean)
        return metrics

    def _needs_tokens(self, rows: list[TokenSequence], columns: TokenBatch) -> bool:
        """Return whether advantages or their metrics need a value per token.

        Every rank computes the advantages of the whole batch. With many ranks, values per token
        would be most of their work.
        """
        return (
            takes_tokens(self._estimator)
            or self._critic is not None
            or self._has_penalties(columns)
            or any(row.teacher_logprobs for row in rows)
            or has_state_keys(rows)
        )

    def _has_penalties(self, columns: TokenBatch) -> bool:
        return "reference" in columns and self._config.kl.place == "reward"

    def _with_past(
        self, inputs: TrajectoryInputs, every_row: list[TokenSequence]
    ) -> TrajectoryInputs:
        """Return the inputs with the running means that the estimator needs."""
        if not self._past_mean.isnan():
            inputs = replace(inputs, past_mean=self._past_mean.clone())
        if inputs.reward_parts_G is not None or self._part_names:
            given_G = inputs.reward_parts_G or {NO_PARTS: inputs.rewards_G}
            self._part_names.update(dict.fromkeys(given_G))
            absent_G = torch.zeros_like(inputs.rewards_G)
            parts_G = dict.fromkeys(self._part_names, absent_G) | dict(given_G)
            inputs = replace(inputs, reward_parts_G=parts_G)
        if needs_roles(self._estimator):
            heads = [row for row in every_row if row.branch == 0]
            role_means_G = self._move_role_means([row.role for row in heads], inputs.rewards_G)
            inputs = replace(inputs, role_means_G=role_means_G)
        return inputs

    def _put_per_trajectory(
        self, inputs: TrajectoryInputs, rows: list[TokenSequence], columns: TokenBatch
    ) -> dict[str, float]:
        advantages_G = estimate_trajectories(
            self._estimator, inputs, **self._config.advantage_kwargs
        )
        ids_B = torch.tensor([row.trajectory_id for row in rows])
        columns.put_per_row("advantages", advantages_G[ids_B].float())
        is_nonzero = advantages_G[ids_B.unique()] != 0
        return {"train/zero_advantage": 1 - int(is_nonzero.sum()) / len(is_nonzero)}

    def _put_per_token(
        self, inputs: AdvantageInputs, rows: list[TokenSequence], columns: TokenBatch
    ) -> dict[str, float]:
        config, metrics = self._config, {}
        if inputs.teacher_logprobs_T is not None:
            gained_T = inputs.teacher_logprobs_T - columns.all("old").cpu()
            metrics["train/kl_teacher"] = -float(gained_T.mean())
        if self._has_penalties(columns):
            kl = KL_ESTIMATORS[config.kl.estimator]
            penalties_T = config.kl.coefficient * kl(columns.all("old"), columns.all("reference"))
            inputs = replace(inputs, penalties_T=penalties_T.to("cpu", torch.float64))
        if self._critic is not None:
            num_trajectories = len(inputs.rewards_G)
            values_T, final_values_G = self._passes.values(rows, self._critic, num_trajectories)
            columns.put("values", values_T)
            inputs = replace(inputs, values_T=values_T.cpu(), final_values_G=final_values_G)
        result = estimate(self._estimator, inputs, **config.advantage_kwargs)
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
        """Update the running mean of each role with its rewards; return each trajectory's, [G].

        n steps towards the mean of n rewards are one step by 1 - 0.95^n, so the order of the
        rewards does not matter.
        """
        slots_G = torch.tensor([self._role_slot(role) for role in roles])
        for slot in slots_G.unique().tolist():
            rewards = rewards_G[slots_G == slot]
            newest = 1 - _ROLE_DECAY ** len(rewards)
            self._role_means[slot] += newest * (rewards.mean() - self._role_means[slot])
        return self._role_means[slots_G]

    def _role_slot(self, role: str) -> int:
        number = 1 + zlib.crc32(role.encode())
        for slot, role_id in enumerate(self._role_ids.tolist()):
            if role_id in (0, number):
                self._role_ids[slot] = number
                return slot
        raise ConfigError(
            f"trainer.advantage=rae keeps means of {_MAX_ROLES} roles, and the tasks have more",
            hints=['data["role"] of a task names a seat at the game, not an episode'],
        )


def _anchored_fraction(inputs: AdvantageInputs) -> float:
    """Return the share of turns that began in the same state as another turn."""
    assert inputs.state_ids_T is not None
    _, first_K = turns_of(inputs.trajectory_ids_T, inputs.turn_ids_T)
    state_ids_K = inputs.state_ids_T[first_K]
    _, index_K, counts = state_ids_K.unique(return_inverse=True, return_counts=True)
    return float(((counts[index_K] > 1) & (state_ids_K >= 0)).float().mean())
