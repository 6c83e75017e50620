"""Advantages that compare what was done in equal states of an episode."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.advantages import dr_grpo, grpo, require_finite
from areal_gym.trainer.algorithms.token_advantages import discounted_returns, turns_of


def gigpo(
    rewards_G: Tensor,
    group_ids_G: Tensor,
    *,
    rewards_T: Tensor,
    trajectory_ids_T: Tensor,
    turn_ids_T: Tensor,
    state_ids_T: Tensor | None = None,
    step_weight: float = 1.0,
    discount: float = 0.95,
    is_normalised: bool = False,
) -> Tensor:
    """Compute the advantage among siblings plus that among equal states (Feng et al. 2025, GiGPO).

    2505.10978, eq. 3 to 8: A = A_episode + step_weight A_step. A_episode is r - group mean.
    A_step is R_k - the mean of the R of all turns, of any sibling, that began in the same anchor
    state; R_k = r_k + discount R_(k+1) is the turn's return. So two ways out of one state are
    compared without another episode from there, and a way back into it costs what it took. A state
    seen once, or without a key, adds 0: `train/anchored_fraction` is the share of the others.
    `is_normalised` divides both by their unbiased standard deviations + 1e-6; the paper has both
    forms. `discount` is per turn. Gives [T].

    Raises:
        ConfigError: a group has fewer than two members, or a discount outside of (0, 1].
    """
    if not 0 < discount <= 1:
        raise ConfigError(f"discount = {discount} must be above 0 and at most 1")
    require_finite("gigpo", rewards_G=rewards_G, rewards_T=rewards_T)
    by_episode_G = (grpo if is_normalised else dr_grpo)(rewards_G, group_ids_G)
    turn_of_T, first_K = turns_of(trajectory_ids_T, turn_ids_T)
    sums_K = torch.zeros(len(first_K), dtype=torch.float64)
    rewards_K = sums_K.index_add(0, turn_of_T, rewards_T.to("cpu", torch.float64))
    returns_K = discounted_returns(rewards_K, trajectory_ids_T[first_K], discount)
    if state_ids_T is None:
        return by_episode_G[trajectory_ids_T]
    by_step_K = _among_equal_states(returns_K, state_ids_T[first_K], is_normalised)
    return by_episode_G[trajectory_ids_T] + step_weight * by_step_K[turn_of_T]


def _among_equal_states(returns_K: Tensor, state_ids_K: Tensor, is_normalised: bool) -> Tensor:
    """Compare each turn's return with the others in its state; a state seen once gives 0."""
    _, index_K, counts = state_ids_K.unique(return_inverse=True, return_counts=True)
    is_compared_K = (counts[index_K] > 1) & (state_ids_K >= 0)
    advantages_K = torch.zeros_like(returns_K)
    if is_compared_K.any():
        compare = grpo if is_normalised else dr_grpo
        advantages_K[is_compared_K] = compare(returns_K[is_compared_K], index_K[is_compared_K])
    return advantages_K
