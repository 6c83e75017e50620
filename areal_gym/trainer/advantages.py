"""Advantage estimators: pure functions of rewards and group ids, in float64 on the CPU.

Each takes `rewards_G` [G] and `group_ids_G` [G] (which trajectories are siblings; groups may be
ragged) and gives `advantages_G` [G], one number for all policy tokens of a trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from areal_gym.errors import ConfigError

__all__ = ["AdvantageEstimator", "dr_grpo", "grpo", "reinforce", "returns_to_go", "rloo"]

AdvantageEstimator = Callable[[Tensor, Tensor], Tensor]

_EPS = 1e-6


def grpo(rewards_G: Tensor, group_ids_G: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-6) inside each group (Shao et al. 2024, DeepSeekMath, section 4.1.2).

    The standard deviation is the unbiased one. A group of equal rewards gets exactly 0.

    Raises:
        ConfigError: a group has fewer than two members.
    """
    centred_G, index_G, counts = _centred(rewards_G, group_ids_G, "grpo")
    squares = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index_G, centred_G**2)
    std_G = (squares / (counts - 1)).sqrt()[index_G]
    return torch.where(std_G > 0, centred_G / (std_G + _EPS), torch.zeros_like(centred_G))


def dr_grpo(rewards_G: Tensor, group_ids_G: Tensor) -> Tensor:
    """r - mean inside each group, without the standard deviation (Liu et al. 2025, Dr. GRPO).

    Its loss is aggregated with a constant length: `trainer.aggregation=constant_length`.

    Raises:
        ConfigError: a group has fewer than two members.
    """
    return _centred(rewards_G, group_ids_G, "dr_grpo")[0]


def rloo(rewards_G: Tensor, group_ids_G: Tensor) -> Tensor:
    """r - mean of the other members of the group (Ahmadian et al. 2024, eq. 8).

    Raises:
        ConfigError: a group has fewer than two members.
    """
    centred_G, index_G, counts = _centred(rewards_G, group_ids_G, "rloo")
    counts_G = counts[index_G]
    return centred_G * counts_G / (counts_G - 1)


def reinforce(rewards_G: Tensor, group_ids_G: Tensor) -> Tensor:
    """The reward itself (Williams 1992), without a baseline; groups do not matter."""
    return rewards_G.to("cpu", torch.float64)


def returns_to_go(turn_rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """R_k = r_k + discount R_{k+1}, for each turn of one trajectory.

    Discounting follows the trajectory's own turns, never the order in which calls were made.
    """
    returns: list[float] = []
    for reward in reversed(turn_rewards):
        returns.append(reward + discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


def _centred(rewards_G: Tensor, group_ids_G: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """r - group mean [G], the group's index of each member [G], the groups' sizes [groups]."""
    rewards_G = rewards_G.to("cpu", torch.float64)
    _, index_G, counts = torch.unique(
        group_ids_G.to("cpu"), return_inverse=True, return_counts=True
    )
    if len(counts) and int(counts.min()) < 2:
        raise ConfigError(
            f"{name} compares siblings, and a group has only one member",
            hints=["rollout.min_group_size=2 drops such groups", "or trainer.advantage=reinforce"],
        )
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index_G, rewards_G)
    centred_G = rewards_G - (sums / counts)[index_G]
    # Equal rewards must give exactly 0, whatever rounding made of their mean.
    high = torch.full_like(sums, -torch.inf).scatter_reduce(0, index_G, rewards_G, "amax")
    low = torch.full_like(sums, torch.inf).scatter_reduce(0, index_G, rewards_G, "amin")
    is_flat_G = (high == low)[index_G]
    return centred_G.masked_fill(is_flat_G, 0.0), index_G, counts
