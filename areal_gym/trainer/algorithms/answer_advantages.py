"""Advantages by how much likelier each turn makes the known answer."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.advantages import grpo, require_finite
from areal_gym.trainer.algorithms.token_advantages import discounted_returns, turns_of


def igpo(
    rewards_G: Tensor,
    group_ids_G: Tensor,
    *,
    trajectory_ids_T: Tensor,
    turn_ids_T: Tensor,
    answer_probs_T: Tensor,
    discount: float = 1.0,
    gain_weight: float = 1.0,
    normalises_jointly: bool = False,
    answer: str = "{answer}",
) -> Tensor:
    """Compute each turn's return of information gains and outcome (Wang et al. 2025, IGPO).

    2510.14967, eq. 3 to 6. With p_k the probability of the known answer when turn k begins, turn k
    gains p_(k+1) - p_k; the last turn earns the trajectory's reward instead. Gains and rewards are
    normalised within the group, (x - mean) / (std + 1e-6), each by themselves, or together with
    `normalises_jointly`; then A_k = x_k + discount A_(k+1). The authors' program offers both.
    So turns are told apart, and a group of equal rewards still teaches.
    `gain_weight` multiplies normalised gains; 0 is GRPO, but for the discount. `discount` is per
    turn. `answer` is the known answer as a text with fields of the task's data; it is not used
    here, but where `answer_probs_T` come from (`areal_gym.runs.known_answers`). Gives [T].

    Raises:
        ConfigError: a group has fewer than two members, or a discount outside of (0, 1].
    """
    if not 0 < discount <= 1:
        raise ConfigError(f"discount = {discount} must be above 0 and at most 1")
    require_finite("igpo", rewards_G=rewards_G, answer_probs_T=answer_probs_T)
    outcomes_G = grpo(rewards_G, group_ids_G)  # refuses groups of one, too
    turn_of_T, first_K = turns_of(trajectory_ids_T, turn_ids_T)
    trajectory_K = trajectory_ids_T[first_K]
    group_K = group_ids_G.to("cpu")[trajectory_K]
    probs_K = answer_probs_T.to("cpu", torch.float64)[first_K]
    is_last_K = trajectory_K != torch.cat([trajectory_K[1:], torch.tensor([-1])])
    gains_K = probs_K.roll(-1) - probs_K
    earned_K = torch.zeros_like(probs_K)
    if normalises_jointly:
        rewards_K = rewards_G.to("cpu", torch.float64)[trajectory_K]
        earned_K = _normalised(torch.where(is_last_K, rewards_K, gains_K), group_K)
        earned_K[~is_last_K] *= gain_weight
    else:
        earned_K[is_last_K] = outcomes_G[trajectory_K[is_last_K]]
        earned_K[~is_last_K] = gain_weight * _normalised(gains_K[~is_last_K], group_K[~is_last_K])
    return discounted_returns(earned_K, trajectory_K, discount)[turn_of_T]


def _normalised(values_K: Tensor, group_K: Tensor) -> Tensor:
    """Normalise within groups; a value that is its group's only one gives 0."""
    normalised_K = torch.zeros_like(values_K)
    _, index_K, counts = group_K.unique(return_inverse=True, return_counts=True)
    has_others_K = counts[index_K] > 1
    if has_others_K.any():
        normalised_K[has_others_K] = grpo(values_K[has_others_K], index_K[has_others_K])
    return normalised_K
