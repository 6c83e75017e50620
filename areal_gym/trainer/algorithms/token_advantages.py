"""Advantage estimators that work per token or per turn; `advantages.estimate` calls them.

All give one number per policy token, [T]; tools' outputs are no tokens here, so that nothing is
discounted across them. Arguments that are not explained are fields of `AdvantageInputs`; those that
an estimator does not use are there because all estimators take them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from areal_gym.errors import ConfigError, did_you_mean
from areal_gym.trainer.algorithms.advantages import (
    AdvantageEstimator,
    Advantages,
    dr_grpo,
    grpo,
    lite_ppo,
    normalise,
    reinforce,
    require_finite,
    rloo,
)

BASELINES: dict[str, AdvantageEstimator] = {
    estimator.__name__: estimator for estimator in (grpo, dr_grpo, rloo, lite_ppo, reinforce)
}
"""The baselines that `per_turn` accepts."""

BaselineName = Literal["grpo", "dr_grpo", "rloo", "lite_ppo", "reinforce"]
"""The names of `BASELINES`, for the check of settings."""


def gae(
    rewards_G: Tensor,
    group_ids_G: Tensor,
    *,
    rewards_T: Tensor,
    trajectory_ids_T: Tensor,
    turn_ids_T: Tensor,
    values_T: Tensor,
    final_values_G: Tensor | None = None,
    discount: float = 1.0,
    lam: float = 1.0,
    unit: Literal["token", "turn"] = "token",
    is_normalised: bool = False,
) -> Advantages:
    """Compute A_t = delta_t + discount lam A_(t+1), delta_t = r_t + discount V_(t+1) - V_t.

    Schulman et al. 2016 (generalised advantage estimation), eq. 16. Groups do not matter.

    `lam` 1 is the whole return minus the value, 0 one step. With `unit="turn"` a step is a turn,
    whose value is the one before its first token, and whose tokens share its advantage and return.
    `is_normalised` gives advantages mean 0 and deviation 1 over the batch's tokens.
    """
    require_finite("gae", rewards_T=rewards_T, values_T=values_T, final_values_G=final_values_G)
    rewards_T, values_T = (x.to("cpu", torch.float64) for x in (rewards_T, values_T))
    step_ids_T: Tensor | slice
    if unit == "turn":
        step_ids_T, first_S = turns_of(trajectory_ids_T, turn_ids_T)
        rewards_S = _sum_by(rewards_T, step_ids_T, len(first_S))
        values_S, trajectory_S = values_T[first_S], trajectory_ids_T[first_S]
    else:
        step_ids_T = slice(None)
        rewards_S, values_S, trajectory_S = rewards_T, values_T, trajectory_ids_T
    _, counts = torch.unique_consecutive(trajectory_S, return_counts=True)
    next_values_S = values_S.roll(-1)
    last_of = counts.cumsum(0) - 1
    next_values_S[last_of] = (
        0.0
        if final_values_G is None
        else final_values_G.to("cpu", torch.float64)[trajectory_S[last_of]]
    )
    deltas_S = rewards_S + discount * next_values_S - values_S
    advantages_S = _discounted_sums(deltas_S, counts, discount * lam)
    advantages_T = advantages_S[step_ids_T]
    return Advantages(
        normalise(advantages_T) if is_normalised else advantages_T,
        returns_T=(advantages_S + values_S)[step_ids_T],
    )


def reinforce_pp(
    rewards_G: Tensor, group_ids_G: Tensor, *, rewards_T: Tensor, trajectory_ids_T: Tensor
) -> Tensor:
    """Normalise each token's return-to-go over the batch's tokens (Hu et al. 2025, REINFORCE++).

    With the penalty k1 in the reward (`AdvantageInputs.penalties_T`) it is the paper's: r minus the
    sum of the KL from here on. There is no critic and no group.
    """
    require_finite("reinforce_pp", rewards_T=rewards_T)
    return normalise(discounted_returns(rewards_T.to("cpu", torch.float64), trajectory_ids_T, 1.0))


def reinforce_pp_baseline(
    rewards_G: Tensor, group_ids_G: Tensor, *, trajectory_ids_T: Tensor
) -> Tensor:
    """Compute r - group mean, normalised over the batch's tokens (Hu et al. 2025, section 3.2).

    The paper's variant for tasks that are sampled several times; its KL is in the loss, as k2. The
    mean over tokens is not quite 0 where lengths differ, so a group of equal rewards gets a little.

    Raises:
        ConfigError: a group has fewer than two members.
    """
    return normalise(dr_grpo(rewards_G, group_ids_G)[trajectory_ids_T])


def distill(
    rewards_G: Tensor,
    group_ids_G: Tensor,
    *,
    old_logprobs_T: Tensor,
    teacher_logprobs_T: Tensor,
    trajectory_ids_T: Tensor,
    discount: float = 0.0,
) -> Tensor:
    """Compute log teacher(y_t) - log policy(y_t) on the policy's own samples; rewards are ignored.

    The policy gradient of the reverse KL, KL(policy || teacher), on the student's own sequences
    (Agarwal et al. 2024, on-policy distillation, section 3; Gu et al. 2024, MiniLLM, eq. 2), from
    one sample per token. It needs log-probabilities of sampled tokens only, so that a teacher may
    be a server. `discount` is the weight of later tokens: 0 takes each token by itself, whatever it
    leads to (little variance); 1 is the KL of whole sequences.
    """
    require_finite("distill", old_logprobs_T=old_logprobs_T, teacher_logprobs_T=teacher_logprobs_T)
    gained_T = (teacher_logprobs_T - old_logprobs_T).to("cpu", torch.float64)
    return gained_T if discount == 0 else discounted_returns(gained_T, trajectory_ids_T, discount)


def per_turn(
    rewards_G: Tensor,
    group_ids_G: Tensor,
    *,
    rewards_T: Tensor,
    trajectory_ids_T: Tensor,
    turn_ids_T: Tensor,
    baseline: AdvantageEstimator | BaselineName = "grpo",
    by: Literal["trajectory", "turn"] = "trajectory",
    discount: float = 1.0,
) -> Tensor:
    """Compare each turn's return-to-go, R_k = r_k + discount R_(k+1), with its siblings.

    `baseline` is any estimator of rewards and group ids, or the name of a built-in one.
    `by="trajectory"` compares R_k with the siblings' whole returns, as if the trajectory had earned
    R_k in all: with one reward at the end and no discount that is the baseline itself. `by="turn"`
    compares it with the siblings' returns from the same turn on; a turn that no sibling reached
    gets 0. `discount` is per turn.

    Raises:
        ConfigError: an unknown baseline, or a group that it refuses.
    """
    require_finite("per_turn", rewards_G=rewards_G, rewards_T=rewards_T)
    estimator = _baseline(baseline) if isinstance(baseline, str) else baseline
    turn_of_T, first_K = turns_of(trajectory_ids_T, turn_ids_T)
    rewards_K = _sum_by(rewards_T.to("cpu", torch.float64), turn_of_T, len(first_K))
    trajectory_K, number_K = trajectory_ids_T[first_K], turn_ids_T[first_K]
    returns_K = discounted_returns(rewards_K, trajectory_K, discount)
    if by == "turn":
        group_K = group_ids_G.to("cpu")[trajectory_K]
        advantages_K = _among_same_turns(estimator, returns_K, group_K, number_K)
    else:
        totals_G = rewards_G.to("cpu", torch.float64).clone()
        is_first_K = torch.ones_like(trajectory_K, dtype=torch.bool)
        is_first_K[1:] = trajectory_K[1:] != trajectory_K[:-1]
        totals_G[trajectory_K[is_first_K]] = returns_K[is_first_K]
        advantages_K = _among_trajectories(
            estimator, returns_K, trajectory_K, totals_G, group_ids_G.to("cpu")
        )
    return advantages_K[turn_of_T]


def _among_same_turns(
    estimator: AdvantageEstimator, returns_K: Tensor, group_K: Tensor, number_K: Tensor
) -> Tensor:
    _, id_K, counts = torch.unique(
        torch.stack([group_K, number_K]), dim=1, return_inverse=True, return_counts=True
    )
    has_sibling_K = counts[id_K] > 1
    advantages_K = torch.zeros_like(returns_K)
    if has_sibling_K.any():
        advantages_K[has_sibling_K] = estimator(returns_K[has_sibling_K], id_K[has_sibling_K])
    return advantages_K


def _among_trajectories(
    estimator: AdvantageEstimator,
    returns_K: Tensor,
    trajectory_K: Tensor,
    totals_G: Tensor,
    group_ids_G: Tensor,
) -> Tensor:
    """Return one group of siblings per turn, in which the turn's trajectory has the value R_k."""
    totals, group_of = totals_G.tolist(), group_ids_G.tolist()
    members: dict[int, list[int]] = {}
    for i, group_id in enumerate(group_of):
        members.setdefault(group_id, []).append(i)
    rewards: list[float] = []
    ids: list[int] = []
    own: list[int] = []
    for k, (value, i) in enumerate(zip(returns_K.tolist(), trajectory_K.tolist(), strict=True)):
        siblings = members[group_of[i]]
        own.append(len(rewards) + siblings.index(i))
        rewards += [value if j == i else totals[j] for j in siblings]
        ids += [k] * len(siblings)
    advantages: Tensor = estimator(torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids))
    return advantages[torch.tensor(own, dtype=torch.long)]


def discounted_returns(rewards_K: Tensor, trajectory_K: Tensor, discount: float) -> Tensor:
    """Compute R_k = r_k + discount R_(k+1) within each trajectory, [K]."""
    _, counts = torch.unique_consecutive(trajectory_K, return_counts=True)
    return _discounted_sums(rewards_K, counts, discount)


def _discounted_sums(values_K: Tensor, counts: Tensor, discount: float) -> Tensor:
    """Compute S_k = x_k + discount S_(k+1) within runs of so many values, from each run's end.

    All runs take a step at once. The additions are those of a loop over values, in its order: a
    closed form by powers of the discount, or cumulative sums, would round otherwise.
    """
    lengths = counts.numpy()
    if not len(lengths):
        return values_K.clone()
    num_runs, ends = len(lengths), lengths.cumsum()
    # The longest run first: those that still go on after some steps are then the first ones.
    rank = np.empty(num_runs, dtype=np.int64)
    rank[np.argsort(-lengths, kind="stable")] = np.arange(num_runs)
    steps = np.arange(lengths.max())
    num_going = num_runs - np.searchsorted(np.sort(lengths), steps, side="right")
    starts = np.concatenate([[0], num_going.cumsum()])
    step_K = np.repeat(ends, lengths) - 1 - np.arange(len(values_K))
    place_K = starts[step_K] + np.repeat(rank, lengths)
    sums = np.empty(len(values_K))
    sums[place_K] = values_K.numpy()
    later = sums[: starts[1]]
    for start, end in pairwise(starts[1:].tolist()):
        now = sums[start:end]
        now += discount * later[: end - start]
        later = now
    return torch.from_numpy(sums[place_K])


def turns_of(trajectory_ids_T: Tensor, turn_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's turn in the batch [T], and the first token of each turn [K]."""
    is_first_T = torch.ones_like(trajectory_ids_T, dtype=torch.bool)
    is_first_T[1:] = (trajectory_ids_T[1:] != trajectory_ids_T[:-1]) | (
        turn_ids_T[1:] != turn_ids_T[:-1]
    )
    return is_first_T.cumsum(0) - 1, is_first_T.nonzero()[:, 0]


def _sum_by(values_T: Tensor, ids_T: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64).index_add_(0, ids_T, values_T)


def _baseline(name: str) -> AdvantageEstimator:
    if name in BASELINES:
        return BASELINES[name]
    hints = [did_you_mean(name, list(BASELINES)), f"built-in ones: {', '.join(BASELINES)}"]
    raise ConfigError(f"no baseline {name!r}", hints=hints)
