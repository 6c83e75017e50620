"""Converts trajectories to flat rows of trainable tokens.

Nothing is decoded or encoded here: a sequence is the concatenation of the spans of one branch,
which is what the engine saw and sampled. The reward belongs to the trajectory (to its last
*policy* token, where an estimator works per token), also when the row ends with a tool's output.
A trajectory that has forked has several rows, and still one reward and one advantage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from areal_gym.types import Group, TokenSpan, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """One row of a training batch. All lists have the row's length T."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True on the tokens that the policy sampled."""
    old_logprobs: tuple[float, ...]
    """Log-probabilities recorded while sampling; 0 on tokens that the policy did not sample."""
    versions: tuple[int, ...]
    """The policy version that sampled each token; -1 on tokens that the policy did not sample."""
    turn_ids: tuple[int, ...] = ()
    """The turn of each token; tokens before a turn count as part of it."""
    turn_rewards: tuple[float, ...] = ()
    """One per turn of the whole trajectory."""
    num_prompt_tokens: int = 0
    """Leading tokens that siblings share."""
    group_id: int = 0
    """The row's group in the batch."""
    trajectory_id: int = 0
    """The row's trajectory in the batch."""
    branch: int = 0
    """The row's branch of its trajectory."""
    is_truncated: bool = False
    """Whether a limit ended the trajectory."""
    teacher_logprobs: tuple[float, ...] = ()
    """A teacher's log-probabilities, 0 on tokens that the policy did not sample; empty without a
    teacher."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def reward(self) -> float:
        """The sum of rewards over the turns."""
        return sum(self.turn_rewards)

    @property
    def num_trainable(self) -> int:
        """The number of tokens to train on."""
        return sum(self.loss_mask)


def make_sequences(
    trajectory: Trajectory, group_id: int = 0, trajectory_id: int = 0
) -> list[Sequence]:
    """Make the training rows of a trajectory: one per branch, or an empty one without branches."""
    return [
        _make_sequence(
            spans,
            turn_rewards=tuple(turn.reward for turn in trajectory.turns),
            group_id=group_id,
            trajectory_id=trajectory_id,
            branch=branch,
            is_truncated=trajectory.stop_reason.is_truncation,
        )
        for branch, spans in enumerate(trajectory.branches or [()])
    ]


def _make_sequence(spans: tuple[TokenSpan, ...], **facts: Any) -> Sequence:
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    turn_ids: list[int] = []
    taught: list[float] = []
    for span in spans:
        is_policy = span.origin == "policy"
        token_ids += span.token_ids
        loss_mask += [is_policy] * len(span)
        logprobs += span.logprobs if span.logprobs is not None else [0.0] * len(span)
        version = span.policy_version if span.policy_version is not None else -1
        versions += [version] * len(span)
        turn_ids += [span.turn] * len(span)
        taught += span.teacher_logprobs or [0.0] * len(span)
    has_teacher = any(span.teacher_logprobs is not None for span in spans)
    return Sequence(
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
        old_logprobs=tuple(logprobs),
        versions=tuple(versions),
        turn_ids=tuple(turn_ids),
        teacher_logprobs=tuple(taught) if has_teacher else (),
        num_prompt_tokens=len(spans[0]) if spans and spans[0].origin == "prompt" else 0,
        **facts,
    )


def sequences_of(groups: Iterable[Group]) -> list[Sequence]:
    """Make the rows of a batch in order; ids count groups and trajectories of the batch."""
    rows: list[Sequence] = []
    trajectory_ids = itertools.count()
    for group_id, group in enumerate(groups):
        for trajectory in group:
            rows += make_sequences(trajectory, group_id, next(trajectory_ids))
    return rows
