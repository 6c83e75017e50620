from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry
from areal_gym.trainer.algorithms.losses import (
    LossInputs,
    aggregate,
    aggregation_weights,
    cispo,
    gspo,
    ppo_clip,
    sapo,
    value_loss,
)
from areal_gym.trainer.algorithms.ratios import ratio
from areal_gym.trainer.algorithms.token_loss import TokenLoss
from areal_gym.trainer.batch.experience import TokenBatch

EXTREME = st.floats(-30, 30)


def inputs(
    logprobs: list[float],
    advantages: list[float],
    *,
    proximal: list[float] | None = None,
    sequence_ids: list[int] | None = None,
) -> LossInputs:
    logprobs_T = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    proximal_T = torch.tensor(proximal or logprobs, dtype=torch.float64)
    return LossInputs(
        logprobs=logprobs_T,
        proximal=proximal_T,
        old_logprobs=proximal_T,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sequence_ids=torch.tensor(sequence_ids or [0] * len(logprobs)),
    )


def test_ppo_clip_by_hand():
    # Ratios 1.5 and 0.5; advantages 1, -1, and the other way round.
    up, down = math.log(1.5), math.log(0.5)
    batch = inputs([up, up, down, down], [1.0, -1.0, 1.0, -1.0], proximal=[1e-9, 0, 0, 0])
    loss = ppo_clip(batch, clip_low=0.2, clip_high=0.28)
    assert loss.loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8], abs=1e-6)
    assert loss.metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_ppo_clip_off_and_dual_clip_by_hand():
    batch = inputs([math.log(4.0)] * 2, [-1.0, 1.0], proximal=[1e-12, 0])
    off = ppo_clip(batch, clip_low=None, clip_high=None)
    assert off.loss.tolist() == pytest.approx([4.0, -4.0])
    dual = ppo_clip(batch, dual_clip=3.0)
    assert dual.loss.tolist() == pytest.approx([3.0, -1.28])
    with pytest.raises(ConfigError, match="above 1"):
        ppo_clip(batch, dual_clip=0.5)


def test_gspo_uses_one_ratio_per_sequence():
    # Mean log-ratio of the first sequence: log 1.1; the second is on policy.
    batch = inputs(
        [2 * math.log(1.1), 0.0, 0.3],
        [1.0, 1.0, 2.0],
        proximal=[1e-12, 0.0, 0.3],
        sequence_ids=[0, 0, 1],
    )
    loss = gspo(batch, clip_low=0.2, clip_high=0.2)
    assert loss.loss.tolist() == pytest.approx([-1.1, -1.1, -2.0])


def test_cispo_by_hand():
    batch = inputs([math.log(0.9), math.log(0.01)], [1.0, -2.0], proximal=[math.log(0.1)] * 2)
    loss = cispo(batch, clip_low=0.5, clip_high=4.0)
    # Ratios 9 -> 5 and 0.1 -> 0.5.
    assert loss.loss.tolist() == pytest.approx([-5 * math.log(0.9), 1.0 * math.log(0.01)])
    loss.loss.sum().backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-5.0, 1.0])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sapo_by_hand(level):
    # Ratios 2 and 0.5, in a sequence each: sigmoid(tau (r - 1)) with tau 1 and 1.05.
    batch = inputs(
        [math.log(2), math.log(0.5)], [1.0, -3.0], proximal=[1e-12, 0.0], sequence_ids=[0, 1]
    )
    loss = sapo(batch, level=level)
    up, down = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1.05 / 2))
    assert loss.loss.tolist() == pytest.approx([-4 * up, 3 * 4 / 1.05 * down])
    assert loss.metrics["gate_slope"].tolist() == pytest.approx(
        [4 * up * (1 - up), 4 * down * (1 - down)]
    )
    with pytest.raises(ConfigError, match="above 0"):
        sapo(batch, tau_negative=0.0)


@pytest.mark.parametrize("loss", [gspo, sapo])
def test_sequence_loss_gives_all_tokens_one_advantage(loss):
    settings = {"level": "sequence"} if loss is sapo else {"clip_low": 0.2, "clip_high": 0.2}
    mixed, even = (
        loss(inputs([0.5, 0.1], a, proximal=[0.3, 0.2]), **settings).loss.sum().item()
        for a in ([3.0, -1.0], [1.0, 1.0])
    )
    assert mixed == pytest.approx(even)


def test_value_loss_by_hand():
    values, old, returns = (
        torch.tensor(x) for x in ([0.5, 0.2, 3.0], [0.0, 0.1, 0.2], [1.0, -0.5, 0.7])
    )
    assert value_loss(values, old, returns, clip=None).tolist() == pytest.approx(
        [0.125, 0.245, 2.645]
    )
    # The first would be clipped to 0.2, further from its return; the last to 0.4, nearer.
    assert value_loss(values, old, returns, clip=0.2).tolist() == pytest.approx(
        [0.32, 0.245, 2.645]
    )


@given(d=EXTREME, advantage=st.floats(-3, 3))
def test_losses_equal_their_formulas(d, advantage):
    batch = inputs([d - 31.0], [advantage], proximal=[-31.0])
    r = float(ratio(torch.tensor(d, dtype=torch.float64)))
    clipped = min(max(r, 0.8), 1.28)
    assert float(ppo_clip(batch).loss.detach()) == pytest.approx(
        max(-advantage * r, -advantage * clipped)
    )
    assert float(cispo(batch).loss.detach()) == pytest.approx(-min(r, 5.0) * advantage * (d - 31.0))
    dual = float(ppo_clip(batch, dual_clip=3.0).loss.detach())
    assert dual <= 3 * abs(advantage) + 1e-9 or advantage > 0


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    cut=st.integers(0, 6),
    kind=st.sampled_from(["token_mean", "seq_mean", "constant_length"]),
)
def test_micro_batch_losses_add_up(lengths, cut, kind):
    weights = torch.tensor(aggregation_weights(kind, lengths, constant_length=8))
    weights_T = weights.repeat_interleave(torch.tensor(lengths))
    loss_T = torch.arange(len(weights_T), dtype=torch.float64)
    at = sum(lengths[:cut])
    parts = aggregate(loss_T[:at], weights_T[:at]) + aggregate(loss_T[at:], weights_T[at:])
    assert float(parts) == pytest.approx(float(aggregate(loss_T, weights_T)))


def test_aggregations_by_hand():
    lengths, loss_T = [1, 3], torch.tensor([6.0, 1.0, 2.0, 3.0])

    def total(kind: str) -> float:
        weights = torch.tensor(aggregation_weights(kind, lengths, constant_length=10))
        return float(aggregate(loss_T, weights.repeat_interleave(torch.tensor(lengths))))

    assert total("token_mean") == pytest.approx(12 / 4)
    assert total("seq_mean") == pytest.approx((6 + 2) / 2)
    assert total("constant_length") == pytest.approx((6 / 10 + 6 / 10) / 2)


def test_gspo_token_uses_sequence_ratio_and_token_advantage():
    # Log-ratios 0.3 and -0.1: the sequence's ratio is exp(0.1); the second one is on policy.
    batch = inputs(
        [0.5, 0.1, 0.3], [3.0, -1.0, 2.0], proximal=[0.2, 0.2, 0.3], sequence_ids=[0, 0, 1]
    )
    output = gspo(batch, clip_low=0.2, clip_high=0.2, level="token")
    s = math.exp(0.1)
    assert output.loss.tolist() == pytest.approx([-3 * s, s, -2.0])
    output.loss.sum().backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-3 * s, s, -2.0])
    clipped = gspo(batch, clip_low=0.05, clip_high=0.05, level="token")
    assert clipped.loss.tolist() == pytest.approx([-3 * 1.05, s, -2.0])
    assert clipped.metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0]


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.floats(-2, 2))
def test_gspo_levels_agree_for_one_advantage_per_sequence(drifts, advantage):
    gradients = []
    for level in ("sequence", "token"):
        batch = inputs(drifts, [advantage] * len(drifts), proximal=[1e-9] * len(drifts))
        output = gspo(batch, clip_low=0.2, clip_high=0.2, level=level)
        output.loss.sum().backward()
        gradients.append([*output.loss.tolist(), *batch.logprobs.grad.tolist()])
    assert gradients[0] == pytest.approx(gradients[1])


def corrected(algorithm, weights, drifts=(0.0, 0.0, 0.0), **settings):
    """Loss and gradient of the mean over one sequence of A = 1 with such correction weights."""
    config = TrainerConfig(algorithm=algorithm, **settings)
    proximal_T = torch.full([len(weights)], -1.0, dtype=torch.float64)
    columns = TokenBatch([SimpleNamespace(num_trainable=len(weights))], torch.device("cpu"))
    columns.put("proximal", proximal_T)
    columns.put("old", proximal_T - torch.tensor(weights, dtype=torch.float64).log())
    columns.put("advantages", torch.ones_like(proximal_T))
    logprobs_T = (proximal_T + torch.tensor(drifts, dtype=torch.float64)).requires_grad_()
    loss = TokenLoss(registry().load("losses", config.loss), config)
    output = loss(logprobs_T, columns, [0], proximal="scored", version=1)
    output.loss.mean().backward()
    return output.loss.tolist(), logprobs_T.grad.tolist()


MASKED = {"proximal": "recomputed", "action": "mask", "lower": 0.5, "upper": 5.0}


@pytest.mark.parametrize("algorithm", ["gspo", "sapo"])
def test_token_that_is_masked_out_of_a_sequence_is_not_trained(algorithm):
    """Each token's part of the gradient has its own weight, as in verl: it is not spread evenly."""
    settings = {"loss_kwargs": {"level": "sequence"}, "correction": MASKED}
    _, gradient = corrected(algorithm, [1.0, 2.0, 20.0], **settings)
    assert gradient == pytest.approx([-1 / 3, -2 / 3, 0.0])


def test_sequence_losses_are_as_before_where_weights_are_equal():
    """sum_t of each token's own gradient is the gradient of exp(mean log-ratio)."""
    drifts = [0.1, -0.2, 0.05]
    wide = {"loss_kwargs": {"level": "sequence"}, "clip_low": 0.5, "clip_high": 0.5}
    loss, gradient = corrected("gspo", [2.0, 2.0, 2.0], drifts, **wide)
    s = math.exp(sum(drifts) / 3)
    assert loss == pytest.approx([-2 * s] * 3)
    assert gradient == pytest.approx([-2 * s / 3] * 3)


def test_gspo_bounds_a_ratio_that_nothing_clips():
    """verl holds the log-ratio at 10: a sequence of A < 0 that far away has no gradient."""
    batch = inputs([-1.0], [-1.0], proximal=[-16.0])
    output = gspo(batch)
    output.loss.sum().backward()
    assert (output.loss.item(), batch.logprobs.grad.item()) == (pytest.approx(math.exp(10)), 0)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([2.0, 0.5], 1.0), ([2.0, 2.0], 2.0), ([4.0, 1.0, 2.0], 2.0), ([4.0, 1.0], 2.0)],
)
def test_gmpo_weighs_a_sequence_by_the_geometric_mean(weights, expected):
    """verl's `compute_policy_loss_geo_mean`: exp(mean log(w + 1e-10)) times the sequence's loss."""
    loss, gradient = corrected("gmpo", weights, [0.0] * len(weights))
    assert loss == pytest.approx([-expected] * len(weights))
    assert gradient == pytest.approx([-expected / len(weights)] * len(weights))


def test_gmpo_with_a_masked_token_is_nearly_left_out():
    """The geometric mean takes 1e-10 for a weight of 0, as verl does."""
    loss, _ = corrected("gmpo", [2.0, 20.0], [0.0, 0.0], correction=MASKED)
    assert loss == pytest.approx([-math.sqrt(2e-10)] * 2)
