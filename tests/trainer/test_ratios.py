"""Ratios and divergences on sampled tokens, and what is done to rewards with them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.ratios import (
    adverse_drift,
    binary_kl,
    k1,
    k2,
    k3,
    ratio,
    sequence_mean,
)
from areal_gym.trainer.batch.experience import overlong_penalty, shape_rewards

LOGPROB = st.floats(-12, -1e-3)


def test_kl_estimators_by_hand():
    d = torch.tensor([0.0, 1.0, -1.0])
    zero = torch.zeros(3)
    assert k1(d, zero).tolist() == [0.0, 1.0, -1.0]
    assert k2(d, zero).tolist() == [0.0, 0.5, 0.5]
    assert k3(d, zero).tolist() == pytest.approx([0.0, math.exp(-1), math.e - 2])
    p, base = torch.tensor([0.5]), torch.tensor([0.25])
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert binary_kl(p.log(), base.log()).tolist() == pytest.approx([expected])


def test_k3_of_nearly_equal_policies_is_accurate():
    d = torch.linspace(-1e-6, 1e-6, 1001)
    found = k3(d, torch.zeros_like(d))
    assert found.min() >= -1e-13  # exp(-d) - 1 + d gives 1e-7, of either sign
    assert found.max() < 1e-12


def test_kl_estimator_means_on_a_known_distribution():
    p, base = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = float((p * (p / base).log()).sum())
    for kl in (k1, k3):
        assert float((p * kl(p.log(), base.log())).sum()) == pytest.approx(exact)
    assert float((p * k2(p.log(), base.log())).sum()) > 0
    assert float(binary_kl(p.log(), base.log())[0]) <= exact  # of any one token


def test_k2_gradient_equals_the_kl_gradient():
    base = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        (logp.exp() * (logp - base.log())).sum(), logits, retain_graph=True
    )
    weighted = (logp.exp().detach() * k2(logp, base.log())).sum()
    (found,) = torch.autograd.grad(weighted, logits)
    torch.testing.assert_close(found, exact)


@given(p=LOGPROB, base=LOGPROB)
def test_k2_k3_and_the_binary_kl_are_never_negative(p, base):
    one, other = (torch.tensor([x], dtype=torch.float64) for x in (p, base))
    for kl in (k2, k3, binary_kl):
        assert float(kl(one, other)) >= -1e-12
        assert float(kl(one, one)) == pytest.approx(0.0, abs=1e-12)


def test_ratios_stay_finite():
    assert ratio(torch.tensor([1000.0, -1000.0, float("inf")])).isfinite().all()
    assert float(ratio(torch.tensor(math.log(3.0)))) == pytest.approx(3.0)


def test_sequence_mean_by_hand():
    values, ids = torch.tensor([1.0, 4.0, 3.0]), torch.tensor([0, 1, 0])
    assert sequence_mean(values, ids).tolist() == [2.0, 4.0, 2.0]
    assert sequence_mean(values[:0], ids[:0]).tolist() == []


# ---- shaping ---------------------------------------------------------------------------------


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([10, 8, 7, 6, 0, 25])
    found = overlong_penalty(lengths, max_length=10, tail=4, factor=2.0)
    assert found.tolist() == [-2.0, -1.0, -0.5, 0.0, 0.0, -2.0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_length": 10, "tail": 0}, "above 0"),
        ({"max_length": 10, "tail": 11}, "at most max_length"),
        ({"max_length": 10, "tail": 4, "factor": -1.0}, "pay for length"),
    ],
)
def test_invalid_overlong_penalty_is_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        overlong_penalty(torch.tensor([3]), **settings)


def test_rewards_are_shifted_then_scaled_then_clipped():
    rewards = torch.tensor([0.0, 1.0, -3.0])
    assert shape_rewards(rewards, bias=-0.5, scale=10.0, clip=6.0).tolist() == [-5.0, 5.0, -6.0]
    assert shape_rewards(rewards).tolist() == rewards.tolist()
    with pytest.raises(ConfigError, match="null switches it off"):
        shape_rewards(rewards, clip=0.0)


def test_drift_counts_what_went_against_the_advantage():
    old_T = torch.tensor([0.8, 0.2, 0.2, 0.2, 0.5, 0.5, 0.5]).log()
    now_T = torch.tensor([0.4, 0.3, 0.9, 0.9, 0.1, 0.1, 0.5]).log()
    advantages_T = torch.tensor([2.0, -1.0, -3.0, 3.0, -1.0, 0.0, 2.0])
    # 2 * 0.5^2; 0.5^2; 3, because a ratio counts up to 2; and moves that were asked for
    expected = [0.5, 0.25, 3.0, 0.0, 0.0, 0.0, 0.0]
    drift_T = adverse_drift(now_T, old_T, advantages_T)
    assert drift_T.tolist() == pytest.approx(expected, abs=1e-6)
    lost_T = torch.tensor([-1000.0, 0.0])  # a token that became impossible, or certain
    advantages_T = torch.tensor([1.0, -1.0])
    assert adverse_drift(lost_T, lost_T.flip(0), advantages_T).tolist() == [1.0, 1.0]
