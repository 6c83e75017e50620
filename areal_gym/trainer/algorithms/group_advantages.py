"""Advantage estimators of whole trajectories that compare siblings in other ways than GRPO.

The definitions are those of verl (`verl/trainer/ppo/core_algos.py`, August 2026). As in all
estimators here that compare siblings, a group of one is refused; verl gives it its reward. All are
in float64 on the CPU; arguments that are not explained are fields of `AdvantageInputs`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.advantages import EPS, centred


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
