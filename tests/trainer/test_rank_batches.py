"""Batches are divided among data ranks: own tokens, and the facts of all rows."""

import pickle
from dataclasses import replace

import pytest
import torch

from areal_gym.config import Layout, TrainerConfig
from areal_gym.errors import TrainError
from areal_gym.trainer.algorithms.advantages import (
    dr_grpo,
    estimate,
    estimate_trajectories,
    grpo,
    reinforce,
)
from areal_gym.trainer.batch.experience import (
    TokenBatch,
    advantage_inputs,
    batch_metrics,
    trained,
    trajectory_inputs,
)
from areal_gym.trainer.batch.rank_batches import (
    OtherRanksTokens,
    divide,
    own_members,
    split_by_group,
    with_tokens,
)
from areal_gym.trainer.batch.sequences import Sequence, sequences_of
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.types import (
    FinishReason,
    Group,
    RoutedExperts,
    Task,
    TokenSpan,
    TopTokens,
    Trajectory,
    Turn,
)
from areal_gym.utils.packed_numbers import Ints

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
                teacher_top=TopTokens(Ints(ids).raw.tobytes(), bytes(4 * length), 1),
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
                assert trained[i].teacher_top == expected[i].teacher_top
        _, spare = own_members(ranks, parts, lengths)
        assert trained[spare].token_ids == expected[spare].token_ids
    assert sorted(seen) == list(range(len([row for row in whole if row.num_trainable])))


def test_tokens_of_other_ranks_are_not_sent():
    groups = batch()
    shared, every_own = divide(groups, Layout(shard=3), 1)
    sizes = [len(own) for own in every_own]
    assert max(sizes) < sum(len(group) for group in groups)
    assert all(
        isinstance(span.token_ids, OtherRanksTokens)
        and span.routed_experts is None
        and span.teacher_top is None
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


def test_facts_of_all_rows_are_counted_without_making_their_columns():
    every_row = sequences_of(batch())
    lags = [9 - version for row in every_row for version in row.versions if version >= 0]
    lengths = [sum(row.loss_mask) for row in every_row]
    assert [row.num_trainable for row in every_row] == lengths

    every_row = sequences_of(batch())
    rows = [row for row in every_row if row.num_trainable]
    metrics = batch_metrics(every_row, version=9)
    assert metrics["rollout/staleness_mean"] == sum(lags) / len(lags)
    assert metrics["rollout/staleness_max"] == max(lags)
    assert metrics["rollout/tokens"] == len(lags)
    assert metrics["train/masked_fraction"] == 1 - len(lags) / sum(map(len, every_row))
    trajectory_inputs(every_row, TrainerConfig(reward={"overlong_tail": 0.5}), 8)
    columns = TokenBatch(rows, torch.device("cpu"), {"old": "old_logprobs"})
    columns.put_per_row("advantages", torch.arange(len(rows)).float())
    assert columns.take("old", [2]).tolist() == list(rows[2].trained("old_logprobs"))
    for name in ("loss_mask", "old_logprobs", "versions", "turn_ids"):
        is_read = [not hasattr(getattr(row, name), "_make") for row in rows]
        assert is_read == [
            i == 2 and name in ("loss_mask", "old_logprobs") for i in range(len(rows))
        ]


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, reinforce])
def test_an_advantage_per_trajectory_is_that_of_each_token(estimator):
    groups = batch()
    every_row = [*sequences_of(groups[:2])]
    config = TrainerConfig(reward={"overlong_tail": 0.5, "length_penalty": 0.3, "scale": 2.0})
    by_token = estimate(estimator, advantage_inputs(every_row, config, 8)).advantages_T
    advantages_G = estimate_trajectories(estimator, trajectory_inputs(every_row, config, 8))
    columns = TokenBatch(every_row, torch.device("cpu"))
    columns.put_per_row("advantages", advantages_G[[row.trajectory_id for row in every_row]])
    assert torch.equal(columns.all("advantages"), by_token)
    assert len(by_token.unique()) > 2


def test_rows_of_columns_count_their_runs():
    columns = {
        "loss_mask": (False, True, True, False, True, True),
        "old_logprobs": (0.0, -1.0, -2.0, 0.0, -3.0, -4.0),
        "versions": (-1, 4, 4, -1, 4, 5),
    }
    row = Sequence(token_ids=range(6), turn_ids=(0, 0, 0, 1, 1, 1), **columns)
    assert row.runs == ((0, 4, 2), (1, 4, 1), (1, 5, 1))
    assert row.num_trainable == Sequence(token_ids=range(6), **columns).num_trainable == 4
    assert trained([row], "versions").tolist() == [4, 4, 4, 5]
