"""The contract kit: every built-in keeps its contract, and every broken rule is named."""

from __future__ import annotations

import re

import pytest
import torch

from areal_gym.testing import check_advantage_estimator, check_policy_loss, check_reward
from areal_gym.trainer.algorithms.advantages import (
    dr_grpo,
    grpo,
    lite_ppo,
    reinforce,
    reinforce_baseline,
    rloo,
)
from areal_gym.trainer.algorithms.losses import LossOutput, cispo, gspo, ppo_clip, sapo
from areal_gym.trainer.algorithms.ratios import sequence_mean
from areal_gym.trainer.algorithms.token_advantages import (
    gae,
    per_turn,
    reinforce_pp,
    reinforce_pp_baseline,
)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (ppo_clip, {}),
        (ppo_clip, {"clip_low": None, "clip_high": None}),
        (ppo_clip, {"dual_clip": 3.0}),
        (gspo, {}),
        (gspo, {"clip_low": None, "clip_high": None}),
        (cispo, {}),
        (cispo, {"clip_low": 0.2, "clip_high": None}),
        (sapo, {}),
        (sapo, {"level": "sequence"}),
    ],
)
def test_built_in_losses_keep_the_contract(loss, settings):
    check_policy_loss(loss, **settings)


@pytest.mark.parametrize(
    ("estimator", "compares", "settings"),
    [
        (grpo, "siblings", {}),
        (dr_grpo, "siblings", {}),
        (rloo, "siblings", {}),
        (lite_ppo, "siblings", {}),
        (reinforce, "nothing", {}),
        (reinforce_baseline, "nothing", {}),
        (gae, "nothing", {}),
        (gae, "nothing", {"unit": "turn", "lam": 0.9}),
        (reinforce_pp, "batch", {}),
        (reinforce_pp_baseline, "batch", {}),
        (per_turn, "siblings", {}),
        (per_turn, "siblings", {"baseline": "rloo", "by": "turn"}),
    ],
)
def test_built_in_estimators_keep_the_contract(estimator, compares, settings):
    check_advantage_estimator(estimator, compares=compares, **settings)


# ---- what it finds ---------------------------------------------------------------------------


def surrogate(batch):
    return -batch.advantages * (batch.logprobs - batch.proximal).clamp(-20, 20).exp()


def summed(batch):
    return LossOutput(loss=surrogate(batch).sum())


def constant(batch):
    return LossOutput(loss=surrogate(batch).detach())


def random(batch):
    return LossOutput(loss=surrogate(batch) * torch.rand(()))


def in_place(batch):
    batch.advantages.mul_(2)
    return LossOutput(loss=surrogate(batch))


def live_metric(batch):
    return LossOutput(loss=surrogate(batch), metrics={"ratio": surrogate(batch)})


def upside_down(batch):
    return LossOutput(loss=-surrogate(batch))


def divided(batch):
    lengths_T = batch.sequence_ids.bincount()[batch.sequence_ids]
    return LossOutput(loss=surrogate(batch) / lengths_T)


def crowd(batch):
    return LossOutput(loss=surrogate(batch) + (batch.logprobs - batch.proximal).mean() * 0.1)


def whitened(batch):
    return LossOutput(
        loss=surrogate(batch) * (1 + (batch.logprobs - batch.proximal).mean().detach())
    )


def explosive(batch):
    return LossOutput(loss=-batch.advantages * ((batch.logprobs - batch.proximal) * 3).exp() / 3)


def leaky(batch):
    """Its tokens look at the sequence next door, but only where ratios are huge."""
    d_T = batch.logprobs - batch.proximal
    is_huge = d_T.abs().max() > 10
    return LossOutput(loss=surrogate(batch) + is_huge * d_T.mean())


@pytest.mark.parametrize(
    ("loss", "rule"),
    [
        (summed, "not \\[T\\]"),
        (constant, "carries no gradient"),
        (random, "called twice"),
        (in_place, "changes its inputs in place"),
        (live_metric, "metric 'ratio' carries a gradient"),
        (upside_down, "not REINFORCE's"),
        (divided, "not REINFORCE's"),
        (crowd, "not REINFORCE's"),
        (whitened, "depends on what else is in the micro-batch"),
        (explosive, "not finite where the log-ratio is 30"),
        (leaky, "masked tokens have a gradient"),
    ],
)
def test_contract_detects_broken_losses(loss, rule):
    with pytest.raises(AssertionError, match=rule):
        check_policy_loss(loss)


def by_place(rewards_G, group_ids_G):
    return rewards_G * torch.arange(1, len(rewards_G) + 1)


def by_name(rewards_G, group_ids_G):
    return rewards_G * (1 + group_ids_G)


def negative(rewards_G, group_ids_G):
    return -dr_grpo(rewards_G, group_ids_G)


def eager(rewards_G, group_ids_G):
    return dr_grpo(rewards_G, group_ids_G) + 1


def greedy(rewards_G, group_ids_G):
    rewards_G -= rewards_G.mean()
    return rewards_G


@pytest.mark.parametrize(
    ("estimator", "rule"),
    [
        (by_place, "the order of trajectories"),
        (by_name, "the groups' ids"),
        (negative, "no more than the worst"),
        (reinforce, "a constant added to all rewards of the siblings"),
        (eager, "do not give exactly 0"),
        (greedy, "changes its inputs in place"),
    ],
)
def test_contract_detects_broken_estimators(estimator, rule):
    with pytest.raises(AssertionError, match=rule):
        check_advantage_estimator(estimator)


def test_sequence_losses_are_checked_by_their_sum():
    def loss(batch):
        log_ratio_T = sequence_mean(batch.logprobs - batch.proximal, batch.sequence_ids)
        return LossOutput(loss=-batch.advantages * log_ratio_T.clamp(-20, 20).exp())

    check_policy_loss(loss)


def long_is_good(completion):
    return len(completion) / 10


def raises_on_nothing(completion):
    return float(completion.split()[-1] == "4")


def shy(completion, answer):
    return float(completion == answer)


class Counting:
    def __init__(self):
        self.num_calls = 0

    def __call__(self, completion):
        self.num_calls += 1
        return float(completion == "4") / self.num_calls


def spoils(completion, row):
    row["seen"] = True
    return float(completion == "4")


@pytest.mark.parametrize(
    ("reward", "rule"),
    [
        (long_is_good, "earns 1000.0, and the right completion 0.2"),
        (raises_on_nothing, "the text '': reward 'raises_on_nothing' raised IndexError"),
        (lambda completion: 1.0, "the right completion earns 1.0, the wrong one 1.0"),
        (shy, "it needs columns that the row does not have: answer"),
        (Counting(), "'4' alone earns another reward"),
        (spoils, "it changes the row"),
        (lambda completion: float("nan"), "returned nan"),
    ],
)
def test_broken_rules_of_rewards_are_named(reward, rule):
    right, wrong = ("44", "4") if reward is long_is_good else ("4", "5")
    with pytest.raises(AssertionError, match=re.escape(rule)):
        check_reward(reward, row={}, right=right, wrong=wrong)
