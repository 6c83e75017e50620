"""Batches are divided among data ranks: own tokens, and the facts of all rows."""

import pickle
from dataclasses import replace

import pytest

from areal_gym.config import Layout
from areal_gym.errors import TrainError
from areal_gym.trainer.batch.rank_batches import (
    OtherRanksTokens,
    divide,
    own_members,
    split_by_group,
    with_tokens,
)
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.types import FinishReason, Group, RoutedExperts, Task, TokenSpan, Trajectory, Turn

TASK = Task(id="t", data={})


def trajectory(group: int, member: int, *lengths: int) -> Trajectory:
    """Return one of a branch for each of `lengths`."""
    spans = []
    for branch, length in enumerate(lengths):
        ids = range(1000 * group + 100 * member, 1000 * group + 100 * member + length)
        spans += [
            TokenSpan(origin="prompt", token_ids=(group, 7), turn=branch, branch=branch),
            TokenSpan(
                origin="policy",
                token_ids=ids,
                logprobs=[-float(member + 1)] * length,
                policy_version=member,
                turn=branch,
                branch=branch,
                routed_experts=RoutedExperts(bytes(4 * length), 1, 2),
            ),
        ]
    turns = tuple(Turn(finish_reason=FinishReason.STOP, reward=member) for _ in lengths)
    return Trajectory(
        id=f"{group}/{member}",
        group_id=str(group),
        task=TASK,
        env_id="e",
        spans=tuple(spans),
        turns=turns,
    )


def batch() -> list[Group]:
    """Return groups of unlike sizes, with forks and an episode without any token."""
    shapes = ([(3,), (5, 2)], [(9,), (1,), (4, 4)], [(2,), ()])
    return [
        Group(
            id=str(i),
            task=TASK,
            trajectories=tuple(trajectory(i, j, *lengths) for j, lengths in enumerate(members)),
        )
        for i, members in enumerate(shapes)
    ]


@pytest.mark.parametrize("num_minibatches", [1, 2, 3])
@pytest.mark.parametrize(
    "layout",
    [Layout(shard=2), Layout(shard=3), Layout(shard=8), Layout(shard=2, context=2)],
    ids=str,
)
def test_every_rank_gets_what_it_passes_and_facts_of_all(layout, num_minibatches):
    groups = batch()
    whole = sequences_of(groups)
    shared, every_own = divide(groups, layout, num_minibatches)
    shared = pickle.loads(pickle.dumps(shared))
    assert len(every_own) == layout.num_data_ranks
    seen = []
    for rank in range(0, layout.num_ranks, layout.num_ranks // layout.num_data_ranks):
        ranks = Ranks(rank, layout)
        rows = sequences_of(with_tokens(shared, every_own[ranks.data_rank]))
        for ours, theirs in zip(rows, whole, strict=True):
            for name in ("loss_mask", "old_logprobs", "versions", "turn_ids", "turn_rewards"):
                assert getattr(ours, name) == getattr(theirs, name)
            assert len(ours) == len(theirs)
        trained = [row for row in rows if row.num_trainable]
        expected = [row for row in whole if row.num_trainable]
        lengths = [len(row) for row in trained]
        parts = split_by_group([row.group_id for row in trained], num_minibatches)
        for part in ([each] for each in parts):
            mine, spare = own_members(ranks, part, lengths)
            seen += mine
            for i in (*mine, spare):
                assert trained[i].token_ids == expected[i].token_ids
                assert trained[i].routed_experts == expected[i].routed_experts
        _, spare = own_members(ranks, parts, lengths)
        assert trained[spare].token_ids == expected[spare].token_ids
    assert sorted(seen) == list(range(len([row for row in whole if row.num_trainable])))


def test_tokens_of_other_ranks_are_not_sent():
    groups = batch()
    shared, every_own = divide(groups, Layout(shard=3), 1)
    sizes = [len(own) for own in every_own]
    assert max(sizes) < sum(len(group) for group in groups)
    assert all(
        isinstance(span.token_ids, OtherRanksTokens) and span.routed_experts is None
        for group in shared
        for trajectory in group
        for span in trajectory.spans
    )


def test_tokens_of_other_ranks_cannot_be_read():
    absent = OtherRanksTokens(5)
    assert len(absent) == 5
    assert "5 tokens" in repr(absent)
    for read in (list, bytes, tuple, lambda ids: ids[0], lambda ids: ids[1:], lambda ids: ids.raw):
        with pytest.raises(TrainError, match="another rank"):
            read(absent)


def test_a_batch_without_tokens_is_divided():
    groups = [replace(group, trajectories=()) for group in batch()]
    shared, every_own = divide(groups, Layout(shard=2), 2)
    assert every_own == [{}, {}]
    assert with_tokens(shared, {}) == groups
