"""Divides a batch among data ranks: each gets its own token ids, and small values of all rows.

    whole batch --divide--> groups without token ids --to every rank--> with_tokens -> Trainer.step
                      `---> token ids of its own rows --to one rank--------^

Estimators and metrics need the whole batch, so rewards, lengths, versions and recorded
log-probabilities go to every rank. Token ids, and a mixture's experts or a teacher's top tokens,
which take a hundred times as much, go only to the rank that passes their row through its model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from areal_gym.config import Layout
from areal_gym.episode_roles import trained_parts
from areal_gym.errors import TrainError
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.types import Group, RoutedExperts, TokenSpan, TopTokens, Trajectory
from areal_gym.utils.packed_numbers import Ints

SpanTokens = tuple[Ints, RoutedExperts | None, TopTokens | None]
"""A span's token ids, their experts and the teacher's likeliest tokens."""
OwnTokens = Mapping[int, Sequence[SpanTokens]]
"""The tokens of each span of a trajectory, by the trajectory's index in the batch."""


class OtherRanksTokens(Ints):
    """Stands for token ids that another rank has; only their number is known."""

    __slots__ = ("_num_tokens",)

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    @property
    def _view(self) -> NoReturn:  # type: ignore[override]
        raise TrainError(
            "these tokens belong to another rank of the trainer, and are not known to this one",
            hints=["a trainer with its own `step` is given the whole batch in every rank"],
        )

    def __len__(self) -> int:
        return self._num_tokens

    def __repr__(self) -> str:
        return f"<{self._num_tokens:,} tokens of another rank>"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OtherRanksTokens, (self._num_tokens,)


def split_by_group(group_ids: Sequence[int], num_parts: int) -> list[list[int]]:
    """Return the row indexes of each minibatch; a group is never split."""
    ids = sorted(set(group_ids))
    num_parts = min(num_parts, len(ids))
    part_of = {group_id: i * num_parts // len(ids) for i, group_id in enumerate(ids)}
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for place, group_id in enumerate(group_ids):
        parts[part_of[group_id]].append(place)
    return parts


def own_members(
    ranks: Ranks, parts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> tuple[list[int], int]:
    """Return the rows of a data rank, and a spare row to pass if others have more micro-batches.

    Each of `parts` is shared among all ranks. The spare row is one of the rank's own, if any.
    """
    mine = [i for part in parts for i in ranks.share(part, [lengths[i] for i in part])]
    every_row = mine or [i for part in parts for i in part]
    return mine, min(every_row, key=lambda i: lengths[i])


def divide(
    groups: Sequence[Group], layout: Layout, num_minibatches: int
) -> tuple[list[Group], list[OwnTokens]]:
    """Return the groups without token ids, and the ids of each data rank's rows."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rows: list[int] = []  # the trajectory's index of each row that is trained on
    group_ids: list[int] = []
    lengths: list[int] = []
    for group_id, place, trained in trained_parts(groups):
        for spans in trained.branches:
            if any(len(span) for span in spans if span.origin == "policy"):
                rows.append(place)
                group_ids.append(group_id)
                lengths.append(sum(map(len, spans)))
    parts = split_by_group(group_ids, num_minibatches)
    step = layout.num_ranks // layout.num_data_ranks
    every_own: list[OwnTokens] = []
    for first in range(0, layout.num_ranks, step):
        ranks = Ranks(first, layout)
        own: set[int] = set()
        for part in (*([part] for part in parts), parts):
            members, spare = own_members(ranks, part, lengths) if rows else ([], 0)
            own |= {rows[i] for i in (*members, spare)} if rows else set()
        every_own.append(
            {
                place: [
                    (Ints.of(s.token_ids), s.routed_experts, s.teacher_top)
                    for s in trajectories[place].spans
                ]
                for place in sorted(own)
            }
        )
    return [_without_tokens(group) for group in groups], every_own


def with_tokens(groups: Sequence[Group], own: OwnTokens) -> list[Group]:
    """Return the groups of `divide` with one rank's token ids filled in."""
    place = -1

    def filled(trajectory: Trajectory) -> Trajectory:
        nonlocal place
        place += 1
        if place not in own:
            return trajectory
        pairs = zip(trajectory.spans, own[place], strict=True)
        spans = (
            replace(span, token_ids=ids, routed_experts=experts, teacher_top=top)
            for span, (ids, experts, top) in pairs
        )
        return replace(trajectory, spans=tuple(spans))

    return [replace(g, trajectories=tuple(filled(t) for t in g)) for g in groups]


def _without_tokens(group: Group) -> Group:
    def bare(span: TokenSpan) -> TokenSpan:
        ids = OtherRanksTokens(len(span))
        return replace(span, token_ids=ids, routed_experts=None, teacher_top=None)

    members = (replace(t, spans=tuple(map(bare, t.spans))) for t in group)
    return replace(group, trajectories=tuple(members))
