"""Several ranks train what one rank trains: real processes, gloo on the CPU."""

from __future__ import annotations

import os
import signal
from socket import gethostname

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.config import Layout, TrainerConfig, load_config
from areal_gym.errors import ConfigError, LostRankError, TrainError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Group
from tests._support.tiny_training import batch, tiny_checkpoint, tiny_decoder, without_costs


def weights_of(learner):
    return torch.cat([tensor.flatten().clone() for _, tensor in learner.weights()])


def assert_same_training(theirs, ours, *, steps=2, tolerance=1e-5):
    """By the weights' movement, and by every metric."""
    start = weights_of(ours)
    for step in range(steps):
        groups = batch(step, num_groups=4)  # the second one is stale
        found = without_costs(theirs.step(groups, step))
        expected = without_costs(ours.step(groups, step))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=10 * tolerance, abs=tolerance), name
    moved = (weights_of(ours) - start).norm()
    assert moved > 1e-3
    apart = (weights_of(theirs) - weights_of(ours)).abs().sort().values
    # Adam makes a whole step out of the rounding of a gradient of 1e-8: that may befall a few.
    assert apart[:-3].norm() / moved < tolerance
    assert apart[-3:].max() < 1e-3


def ranked(settings, *, policy=None, **arguments):
    arguments = {"advantage": grpo, "loss": ppo_clip, **arguments}
    return ProcessTrainer(Trainer, policy or tiny_checkpoint(), settings, **arguments)


@pytest.mark.parametrize(
    ("num_ranks", "settings", "tolerance"),
    [
        (2, {"recompute_layers": True, "tokens_per_microbatch": 64}, 1e-5),
        pytest.param(2, {"minibatches": 2}, 1e-5, marks=pytest.mark.long),
        pytest.param(3, {"aggregation": "seq_mean"}, 1e-5, marks=pytest.mark.long),
        (2, {"optimizer": "muon"}, 1e-5),
    ],
)
def test_ranks_train_what_one_rank_trains(num_ranks, settings, tolerance):
    config = TrainerConfig(lr=1e-2, num_ranks=num_ranks, **settings)
    theirs = ranked(config)
    ours = Trainer(tiny_decoder(), config, advantage=grpo, loss=ppo_clip)
    try:
        assert_same_training(theirs, ours, tolerance=tolerance)
        rows = sequences_of(tuple(batch(7)))
        for found, expected in zip(theirs.score(rows), ours.score(rows), strict=True):
            torch.testing.assert_close(found, expected, atol=10 * tolerance, rtol=tolerance)
        for told, known in zip(theirs.trained_tokens(), ours.trained_tokens(), strict=True):
            assert told["trajectory"] == known["trajectory"]
            for name in ("advantages", "logprobs"):
                assert told[name] == pytest.approx(known[name], abs=20 * tolerance)
    finally:
        theirs.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("settings", [{}, {"cpu_offload": True}])
def test_ranks_on_gpus_train_what_one_rank_trains(settings):
    config = TrainerConfig(lr=1e-2, num_ranks=2, minibatches=2, **settings)
    theirs = ranked(config, device="cuda")
    ours = Trainer(tiny_decoder(), config, advantage=grpo, loss=ppo_clip)
    try:
        assert_same_training(theirs, ours, tolerance=1e-3)
    finally:
        theirs.close()


def test_critic_and_reference_are_sharded(tiny_policy):
    config = TrainerConfig(
        algorithm="ppo", kl={"coefficient": 0.1}, lr=1e-2, num_ranks=2, minibatches=2
    )
    arguments = {"advantage": gae, "loss": ppo_clip, "reference": tiny_policy}
    theirs = ranked(config, policy=tiny_policy, **arguments)
    ours = Trainer(load_checkpoint(tiny_policy), config, **arguments)
    try:
        assert_same_training(theirs, ours)
    finally:
        theirs.close()


@pytest.mark.parametrize(
    ("num_ranks", "others", "settings"),
    [
        (1, [3], {}),
        # Of the critic's head, one rank has nothing.
        pytest.param(2, [1, 3], {"algorithm": "ppo"}, marks=pytest.mark.long),
    ],
)
def test_checkpoint_resumes_with_another_number_of_ranks(num_ranks, others, settings, tmp_path):
    config = TrainerConfig(lr=1e-2, num_ranks=num_ranks, **settings)
    advantage = gae if settings else grpo
    first = ranked(config, advantage=advantage)
    try:
        first.step(batch(0), 0)
        weights = {name: tensor.clone() for name, tensor in first.weights()}
        written = first.save(tmp_path / "states")
        first.step(batch(1), 1)  # beside it
        expected = weights_of(first)
        written.result()
    finally:
        first.close()
    assert len(list((tmp_path / "states").glob("*.distcp"))) == num_ranks
    for num_ranks in others:
        decoder = tiny_decoder(seed=5)
        decoder.load_state_dict(weights)
        policy = save_checkpoint(decoder, tmp_path / f"policy-{num_ranks}")
        other = ranked(
            config.model_copy(update={"num_ranks": num_ranks}), policy=policy, advantage=advantage
        )
        try:
            other.load(tmp_path / "states")
            other.step(batch(1), 1)
            torch.testing.assert_close(weights_of(other), expected, atol=1e-6, rtol=1e-5)
        finally:
            other.close()


def test_error_on_all_ranks_is_raised_and_ranks_continue():
    learner = ranked(TrainerConfig(num_ranks=2))
    try:
        empty = [Group(id="0", task=g.task, trajectories=()) for g in batch()]
        with pytest.raises(TrainError, match="no token that the policy sampled"):
            learner.step(empty, 0)
        assert learner.step(batch(), 0)["train/grad_norm"] > 0
    finally:
        learner.close()


def test_dead_rank_ends_all_ranks():
    learner = ranked(TrainerConfig(num_ranks=2))
    processes = [worker.process for worker in learner._workers]
    try:
        learner.step(batch(), 0)
        # The first rank is aborted a moment later, as torch's watchdogs do.
        os.kill(processes[1].pid, signal.SIGKILL)
        os.kill(processes[0].pid, signal.SIGABRT)
        for process in processes:
            process.wait()
        found = rf"rank 1 of .* has died: process {processes[1].pid} on {gethostname()} .*SIGKILL"
        with pytest.raises(LostRankError, match=found) as caught:
            learner.step(batch(), 1)
        assert "--resume" in caught.value.hints[0]
    finally:
        learner.close()
    assert all(process.poll() is not None for process in processes)


def test_argument_errors_are_raised_on_every_rank():
    with pytest.raises(ConfigError, match="needs a reference policy"):
        ranked(TrainerConfig(num_ranks=2, kl={"coefficient": 0.1}))


def test_several_ranks_need_processes():
    with pytest.raises(ConfigError, match="processes of their own"):
        load_config(overrides=["trainer.num_ranks=2", "trainer.runs_in=thread"])


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 5))
def test_rank_shares_partition_the_rows_in_order(costs, size):
    members = list(range(100, 100 + len(costs)))
    shares = [Ranks(rank, Layout(shard=size)).share(members, costs) for rank in range(size)]
    assert [m for share in shares for m in share] == members
    fair = sum(costs) / size
    for share in shares:
        assert sum(costs[m - 100] for m in share) <= fair + max(costs, default=0)
