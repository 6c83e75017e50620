"""From trajectories to flat rows of trainable tokens.

Nothing is decoded or encoded here: a sequence is the concatenation of a trajectory's spans, which
is what the engine saw and sampled. The reward belongs to the trajectory (to its last *policy*
token, where an estimator works per token), also when the row ends with a tool's output.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_gym.types import Group, Trajectory

__all__ = ["Sequence", "make_sequence", "sequences_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """One row of a training batch. All lists have the row's length T."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True on the tokens that the policy sampled."""
    old_logprobs: tuple[float, ...]
    """Recorded while sampling; 0 where the policy did not sample."""
    versions: tuple[int, ...]
    """The policy version that sampled each token; -1 where it did not sample."""
    turn_rewards: tuple[float, ...] = ()
    """One per turn."""
    num_prompt_tokens: int = 0
    """Leading tokens that siblings have in common."""
    group_id: int = 0
    """Which group of the batch the row belongs to."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def reward(self) -> float:
        """Sum over the turns."""
        return sum(self.turn_rewards)

    @property
    def num_trainable(self) -> int:
        """How many tokens are trained on."""
        return sum(self.loss_mask)


def make_sequence(trajectory: Trajectory, group_id: int = 0) -> Sequence:
    """The training row of a trajectory."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for span in trajectory.spans:
        is_policy = span.origin == "policy"
        token_ids += span.token_ids
        loss_mask += [is_policy] * len(span)
        logprobs += span.logprobs if span.logprobs is not None else [0.0] * len(span)
        version = span.policy_version if span.policy_version is not None else -1
        versions += [version] * len(span)
    first = trajectory.spans[0] if trajectory.spans else None
    return Sequence(
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
        old_logprobs=tuple(logprobs),
        versions=tuple(versions),
        turn_rewards=tuple(turn.reward for turn in trajectory.turns),
        num_prompt_tokens=len(first) if first is not None and first.origin == "prompt" else 0,
        group_id=group_id,
    )


def sequences_of(groups: list[Group] | tuple[Group, ...]) -> list[Sequence]:
    """The rows of a batch, group by group; `group_id` is the group's place in the batch."""
    return [
        make_sequence(trajectory, group_id)
        for group_id, group in enumerate(groups)
        for trajectory in group
    ]
