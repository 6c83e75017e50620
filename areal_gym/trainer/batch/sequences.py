"""Converts trajectories to flat rows of trainable tokens.

Nothing is decoded or encoded here: a sequence is the concatenation of the spans of one branch,
which is what the engine saw and sampled. The reward belongs to the trajectory (for estimators per
token, to its last *policy* token), even if the row ends with a tool's output. A trajectory that
forked has several rows, but one reward and one advantage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from areal_gym.episode_roles import roles_of, trained_parts
from areal_gym.trainer.batch.rank_batches import OtherRanksTokens
from areal_gym.types import Group, ImageRef, RoutedExperts, TokenSpan, TopTokens, Trajectory
from areal_gym.utils.packed_numbers import Bools, Floats, Ints, PackedNumbers


class TrainedRun(NamedTuple):
    """A number of tokens in a row that one policy version sampled in one turn."""

    turn: int
    version: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """One row of a training batch. All columns have the row's length T and are packed.

    Most columns of a trajectory's row are computed when they are first read, because a rank never
    reads those of most rows; `runs` suffice for what every rank counts in all rows.
    """

    token_ids: Numbers[int]
    loss_mask: Numbers[bool]
    """True on the tokens that the policy sampled."""
    old_logprobs: Numbers[float]
    """Log-probabilities recorded while sampling; 0 on tokens that the policy did not sample."""
    versions: Numbers[int]
    """The policy version that sampled each token; -1 on tokens that the policy did not sample."""
    turn_ids: Numbers[int] = ()
    """The turn of each token; tokens that precede a turn count as part of it."""
    turn_rewards: tuple[float, ...] = ()
    """One reward per turn of the whole trajectory."""
    num_prompt_tokens: int = 0
    """The number of leading tokens that siblings share."""
    group_id: int = 0
    """The row's group in the batch."""
    trajectory_id: int = 0
    """The row's trajectory in the batch; each role of an episode has its own."""
    episode_id: int = 0
    """The row's episode in the batch."""
    branch: int = 0
    """The row's branch of its trajectory."""
    is_truncated: bool = False
    """Whether a limit ended the trajectory."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """The trajectory's reward parts by name."""
    state_keys: tuple[str | None, ...] = ()
    """The environment's key of the state before each turn of the whole trajectory."""
    answer_probs: tuple[float | None, ...] = ()
    """The probability of the known answer before each turn; None if it was not computed."""
    role: str = ""
    """The role that the policy played: that of the turns, else the one in the task's data."""
    images: tuple[ImageRef, ...] = ()
    """The row's images; `start` counts from the row's beginning."""
    teacher_logprobs: Numbers[float] = ()
    """A teacher's log-probabilities, 0 on tokens that the policy did not sample; empty without a
    teacher."""
    routed_experts: RoutedExperts | None = None
    """The experts by which the trained tokens were sampled; None if no engine recorded them."""
    teacher_top: TopTokens | None = None
    """The tokens that a teacher held likeliest at each trained token; None without such a one."""
    runs: tuple[TrainedRun, ...] = ()
    """The tokens to train on; by default they are counted in the columns."""
    num_trainable: int = field(init=False)
    """The number of tokens to train on."""

    def __post_init__(self) -> None:
        for name, packed in _COLUMNS.items():
            object.__setattr__(self, name, packed.of(getattr(self, name)))
        if not self.runs:
            object.__setattr__(self, "runs", self._count_runs())
        object.__setattr__(self, "num_trainable", sum(run.num_tokens for run in self.runs))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def reward(self) -> float:
        """The sum of rewards over the turns."""
        return sum(self.turn_rewards)

    def _count_runs(self) -> tuple[TrainedRun, ...]:
        num_trained = int(np.count_nonzero(self.array("loss_mask")))
        pairs = [
            self.trained(name) if len(getattr(self, name)) else np.zeros(num_trained, np.int32)
            for name in ("turn_ids", "versions")
        ]
        runs, counts = np.unique(np.stack(pairs), axis=1, return_counts=True)
        return tuple(map(TrainedRun, *runs.tolist(), counts.tolist()))

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return a column as an array [T] that shares its memory."""
        return np.asarray(getattr(self, name))

    def trained(self, name: str) -> np.ndarray[Any, Any]:
        """Return a column's values at the tokens to train on."""
        values: np.ndarray[Any, Any] = self.array(name)[self.array("loss_mask")]
        return values


_COLUMNS: dict[str, type[PackedNumbers[Any]]] = {
    "token_ids": Ints,
    "loss_mask": Bools,
    "old_logprobs": Floats,
    "versions": Ints,
    "turn_ids": Ints,
    "teacher_logprobs": Floats,
}


def make_sequences(
    trajectory: Trajectory, group_id: int = 0, trajectory_id: int = 0, episode_id: int = 0
) -> list[Sequence]:
    """Make a trajectory's training rows: one per branch, or one empty row without branches."""
    (role, *_) = (*roles_of(trajectory), trajectory.task.data.get("role", ""))
    return [
        _make_sequence(
            spans,
            turn_rewards=tuple(turn.reward for turn in trajectory.turns),
            group_id=group_id,
            trajectory_id=trajectory_id,
            episode_id=episode_id,
            branch=branch,
            is_truncated=trajectory.stop_reason.is_truncation,
            reward_parts=trajectory.reward_parts,
            state_keys=tuple(turn.state_key for turn in trajectory.turns),
            answer_probs=tuple(turn.answer_prob for turn in trajectory.turns),
            role=str(role),
        )
        for branch, spans in enumerate(trajectory.branches or [()])
    ]


def _make_sequence(spans: tuple[TokenSpan, ...], **fields: Any) -> Sequence:
    lengths = [len(span) for span in spans]

    def repeated(packed: type[PackedNumbers[Any]], values: Iterable[Any]) -> PackedNumbers[Any]:
        span_values = np.array(list(values), packed.NAME)
        return packed.deferred(lambda: packed.from_array(np.repeat(span_values, lengths)))

    sampled = [span for span in spans if span.origin == "policy"]
    known = next((span.routed_experts for span in sampled if span.routed_experts), None)
    has_teacher = any(span.teacher_logprobs for span in spans)
    return Sequence(
        token_ids=_joined_ids([Ints.of(span.token_ids) for span in spans]),
        loss_mask=repeated(Bools, (span.origin == "policy" for span in spans)),
        old_logprobs=_logprobs([span.logprobs or len(span) for span in spans]),
        versions=repeated(
            Ints, (-1 if span.policy_version is None else span.policy_version for span in spans)
        ),
        turn_ids=repeated(Ints, (span.turn for span in spans)),
        teacher_logprobs=_logprobs([span.teacher_logprobs or len(span) for span in spans])
        if has_teacher
        else (),
        runs=tuple(TrainedRun(s.turn, s.policy_version or 0, len(s)) for s in sampled if len(s)),
        routed_experts=known
        and RoutedExperts.joined(s.routed_experts or known.unknown(len(s)) for s in sampled),
        teacher_top=TopTokens.joined(span.teacher_top for span in sampled),
        num_prompt_tokens=lengths[0] if spans and spans[0].origin == "prompt" else 0,
        images=tuple(
            image.moved(start)
            for span, start in zip(spans, itertools.accumulate(lengths, initial=0), strict=False)
            for image in span.images
        ),
        **fields,
    )


def _joined_ids(parts: list[Ints]) -> Ints:
    if any(isinstance(part, OtherRanksTokens) for part in parts):
        return OtherRanksTokens(sum(map(len, parts)))
    return Ints.joined(parts)


def _logprobs(parts: list[Numbers[float] | int]) -> Floats:
    """Return the parts joined, lazily; an integer part stands for that many zeros."""

    def joined() -> Floats:
        arrays = (np.zeros(part) if isinstance(part, int) else np.asarray(part) for part in parts)
        return Floats.from_array(np.concatenate([np.zeros(0), *arrays]))

    return Floats.deferred(joined)


def sequences_of(groups: Iterable[Group]) -> list[Sequence]:
    """Make the rows of a batch in order; ids number its groups, trajectories and episodes.

    Each role of an episode is a trajectory, in one group with its siblings' same role.
    """
    rows: list[Sequence] = []
    for trajectory_id, (group_id, episode_id, part) in enumerate(trained_parts(groups)):
        rows += make_sequences(part, group_id, trajectory_id, episode_id)
    return rows
