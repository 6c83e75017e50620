"""Advantage estimators of whole trajectories that compare siblings in other ways than GRPO.

The definitions of all but `rae` are those of verl (`verl/trainer/ppo/core_algos.py`, August 2026).
As in all estimators here that compare siblings, a group of one is refused; verl gives it its
reward. All are in float64 on the CPU; arguments that are not explained are fields of
`AdvantageInputs`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_gym.errors import ConfigError, did_you_mean
from areal_gym.trainer.algorithms.advantage_inputs import NO_PARTS
from areal_gym.trainer.algorithms.advantages import (
    EPS,
    WHITENING_EPS,
    centred,
    grpo,
    require_finite,
)


def opo(rewards_G: Tensor, group_ids_G: Tensor, *, trajectory_ids_T: Tensor) -> Tensor:
    """Compute r - sum(L r) / sum(L) per group, L the policy's tokens (Hao et al. 2025, 2505.23585).

    OPO's optimal baseline: the variance of a trajectory's gradient grows about as its length, so
    that long ones decide the baseline. Gives [T]; a group without tokens gets 0.

    Raises:
        ConfigError: a group has fewer than two members.
    """
    centred_G, index_G, counts = centred(rewards_G, group_ids_G, "opo")
    lengths_G = trajectory_ids_T.to("cpu").bincount(minlength=len(centred_G)).double()
    sums = torch.zeros(len(counts), dtype=torch.float64)
    # What the baseline is off the group's mean: exactly 0 where rewards are equal.
    weighted = sums.index_add(0, index_G, lengths_G * centred_G)
    baseline = weighted / sums.index_add(0, index_G, lengths_G).clamp(min=1)
    return (centred_G - baseline[index_G])[trajectory_ids_T]


def gpg(rewards_G: Tensor, group_ids_G: Tensor, *, scale: float = 1.0) -> Tensor:
    """Compute alpha (r - group mean) / scale (Chu et al. 2025, 2504.02546, GPG).

    alpha = G / (trajectories of the batch whose reward is not 0) makes up for trajectories that
    teach nothing; counted as verl does. `scale` is the paper's F_norm.

    Raises:
        ConfigError: a group has fewer than two members, or a scale of 0.
    """
    if scale == 0:
        raise ConfigError("scale = 0 divides by 0; GPG has 1")
    centred_G, _, _ = centred(rewards_G, group_ids_G, "gpg")
    alpha = len(rewards_G) / max(int(rewards_G.count_nonzero()), 1)
    return alpha * centred_G / scale


def pass_at_k(rewards_G: Tensor, group_ids_G: Tensor, *, is_normalised: bool = True) -> Tensor:
    """Give the best of a group its lead over the second best, and 0 to all others.

    Tang et al. 2025 (2503.19595), the leave-one-out gradient of E[max of k], k the group's size: a
    trajectory counts where the group would have been worse without it. With rewards of 0 or 1 that
    is the only success of its group. `is_normalised` divides by the group's unbiased standard
    deviation + 1e-6, as verl does by default (its `grpo_passk`).

    Raises:
        ConfigError: a group has fewer than two members.
    """
    centred_G, index_G, counts = centred(rewards_G, group_ids_G, "pass_at_k")
    advantages_G = torch.zeros_like(centred_G)
    for k in range(len(counts)):
        (members,) = (index_G == k).nonzero(as_tuple=True)
        (best, second), (place, _) = centred_G[members].topk(2)
        lead = best - second
        if is_normalised:
            lead = lead / (centred_G[members].std() + EPS)
        advantages_G[members[place]] = lead
    return advantages_G


def gdpo(
    rewards_G: Tensor,
    group_ids_G: Tensor,
    *,
    trajectory_ids_T: Tensor,
    reward_parts_G: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Tensor:
    """Normalise each part of the reward by itself, then their sum (Liu et al. 2026, 2601.05242).

    GDPO: A = sum_k w_k (r_k - group mean) / (group std + 1e-6), then (A - mean) / sqrt(var + 1e-8)
    over the batch's tokens, with unbiased deviations. A sum of rewards would let the part with the
    largest deviation drown the others. `weights` names the parts that count and their weights; by
    default all have 1. Parts are taken as the environment gave them, before `trainer.reward`. Gives
    [T]; a group of equal parts gets what all others leave of the mean, as in verl. A member without
    a part that its siblings have counts as 0 there. A group without any part has its reward as its
    only one, with weight 1; where the whole batch has none, that part is named "reward", as in
    verl.

    Raises:
        ConfigError: a weight of a part that the environment does not give, weights that are all 0,
            or a group of one.
    """
    reward_parts_G = reward_parts_G or {"reward": rewards_G}
    if weights is None:
        weights = dict.fromkeys(reward_parts_G, 1.0)
    elif not any(weights.values()):
        raise ConfigError(
            f"gdpo: weights = {dict(weights)} leave no part of the reward to learn from",
            hints=["give at least one part a weight that is not 0, or weights=null for 1 each"],
        )
    elif NO_PARTS in reward_parts_G:
        weights = {**weights, NO_PARTS: 1.0}
    for name in weights:
        if name not in reward_parts_G:
            names = [each for each in reward_parts_G if each != NO_PARTS]
            near = did_you_mean(name, names)
            known = f"its parts in this batch: {', '.join(names)}"
            raise ConfigError(
                f"gdpo: the environment's rewards have no part {name!r}",
                hints=[near, known] if near else [known],
            )
    total_G = torch.zeros(len(rewards_G), dtype=torch.float64)
    for name, weight in weights.items():
        total_G += weight * grpo(reward_parts_G[name], group_ids_G)
    total_T = total_G[trajectory_ids_T]
    if not len(total_T) or bool((total_T == total_T[0]).all()):
        return torch.zeros_like(total_T)
    return (total_T - total_T.mean()) / (total_T.var() + WHITENING_EPS).sqrt()


def rae(rewards_G: Tensor, group_ids_G: Tensor, *, role_means_G: Tensor) -> Tensor:
    """Compute r - running mean of the rewards of the trajectory's role (Liu et al. 2025, SPIRAL).

    Role-conditioned advantage estimation (2506.24119, algorithm 1): roles of a game, such as who
    moves first, differ in what they can expect, and siblings that all won or all lost still teach.
    A role is `data["role"]` of a trajectory's task; those without one share a role. The trainer
    moves the means first, b <- 0.95^n b + (1 - 0.95^n) mean(r) for the n trajectories of a role:
    the paper's b <- 0.95 b + 0.05 r for each, whatever their order. Groups do not matter.
    """
    require_finite("rae", rewards_G=rewards_G, role_means_G=role_means_G)
    return rewards_G.to("cpu", torch.float64) - role_means_G
