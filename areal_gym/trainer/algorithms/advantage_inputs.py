"""The inputs of advantage estimators: the numbers of a whole batch, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

NO_PARTS = "(reward)"
"""The part that the reward of a group without reward parts is, beside groups with some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryInputs:
    """The inputs of estimators that look at whole trajectories: a batch of G of them."""

    rewards_G: Tensor
    group_ids_G: Tensor
    final_values_G: Tensor | None = None
    """The critic's prediction after the last token of a truncated trajectory; 0 for a finished
    one."""
    reward_parts_G: Mapping[str, Tensor] | None = None
    """Named parts of the rewards, each [G], as the environment gave them, 0 for a missing one;
    None without any. Groups without parts have `NO_PARTS`."""
    role_means_G: Tensor | None = None
    """The running mean of the rewards of each trajectory's role, this batch's included."""
    past_mean: Tensor | None = None
    """[]: the running mean of `rewards_G` over earlier steps; None at the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs(TrajectoryInputs):
    """The inputs of all estimators: a batch of G trajectories, and their T policy tokens in order.

    Tool outputs and prompts are not among the tokens: nothing is discounted across them.
    """

    rewards_T: Tensor
    """The reward on each policy token: a turn's reward is on its last token, 0 elsewhere, less
    `penalties_T`."""
    trajectory_ids_T: Tensor
    """The trajectory of each token, ascending."""
    turn_ids_T: Tensor
    """The turn of each token within its trajectory, 0-based and ascending."""
    values_T: Tensor | None = None
    """The critic's prediction before each token was sampled."""
    old_logprobs_T: Tensor | None = None
    """Log-probabilities recorded while sampling."""
    teacher_logprobs_T: Tensor | None = None
    """A teacher's log-probabilities of the same tokens."""
    state_ids_T: Tensor | None = None
    """The state in which each token's turn began, equal in trajectories of a group that were in the
    same one; -1 where the environment gives no key."""
    answer_probs_T: Tensor | None = None
    """The probability of the task's known answer when each token's turn began."""
    penalties_T: Tensor | None = None
    """The cost of each token: the KL in the reward (Ouyang et al. 2022, InstructGPT, eq. 2).
    `estimate` subtracts it from `rewards_T`; where an estimator does not take those, each token's
    and all later penalties are subtracted from its advantage, after normalisation."""

    @classmethod
    def from_turns(
        cls,
        turn_rewards: Sequence[Sequence[float]],
        turn_lengths: Sequence[Sequence[int]],
        group_ids: Sequence[int],
        *,
        state_keys: Sequence[Sequence[str | None]] | None = None,
        **further: Any,
    ) -> Self:
        """Make the inputs from the rewards and the policy tokens of each trajectory's turns.

        `state_keys` are the environment's names of the states of the turns, if it has any.

        A turn without policy tokens leaves its reward to the token before it; rewards before the
        first token count in `rewards_G` only.
        """
        trajectories: list[int] = []
        turns: list[int] = []
        lengths = torch.tensor([n for part in turn_lengths for n in part], dtype=torch.long)
        rewards_T = torch.zeros(int(lengths.sum()), dtype=torch.float64)
        end = 0
        for i, (rewards_K, lengths_K) in enumerate(zip(turn_rewards, turn_lengths, strict=True)):
            start = end
            for k, (reward, length) in enumerate(zip(rewards_K, lengths_K, strict=True)):
                end += length
                trajectories.append(i)
                turns.append(k)
                if end > start:
                    rewards_T[end - 1] += reward
        trajectories_K = torch.tensor(trajectories, dtype=torch.long)
        turns_K = torch.tensor(turns, dtype=torch.long)
        if state_keys is not None:
            ids: dict[tuple[int, str], int] = {}
            pairs = zip(group_ids, state_keys, strict=True)
            ids_K = [
                -1 if key is None else ids.setdefault((group, key), len(ids))
                for group, keys in pairs
                for key in keys
            ]
            further["state_ids_T"] = torch.tensor(ids_K).long().repeat_interleave(lengths)
        return cls(
            rewards_G=torch.tensor([sum(r) for r in turn_rewards], dtype=torch.float64),
            group_ids_G=torch.tensor(group_ids, dtype=torch.long),
            rewards_T=rewards_T,
            trajectory_ids_T=trajectories_K.repeat_interleave(lengths),
            turn_ids_T=turns_K.repeat_interleave(lengths),
            **further,
        )
