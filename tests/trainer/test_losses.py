from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.errors import ConfigError
from areal_gym.trainer.advantages import dr_grpo, grpo, reinforce, returns_to_go, rloo
from areal_gym.trainer.losses import (
    LossInputs,
    aggregate,
    aggregation_weights,
    cispo,
    gspo,
    importance_weights,
    k3,
    ppo_clip,
)

LOSSES = [ppo_clip, gspo, cispo]
GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "losses.json"
needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="no ../shared/golden/losses.json")


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


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_gradient_is_reinforce(loss):
    batch = inputs([-1.0, -0.5, -2.0], [0.7, -1.2, 0.0])
    loss(batch).loss.sum().backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-0.7, 1.2, 0.0]) or loss is gspo
    if loss is gspo:  # the sequence's gradient is shared by its tokens
        assert batch.logprobs.grad.tolist() == pytest.approx([0.5 / 3] * 3)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("gap", [30.0, -30.0, 300.0])
def test_finite_at_extreme_ratios(loss, gap):
    batch = inputs([-1.0, -1.0], [1.0, -1.0], proximal=[-1.0 - gap, -1.0 - gap])
    output = loss(batch, clip_low=None, clip_high=None)
    output.loss.sum().backward()
    assert output.loss.isfinite().all()
    assert batch.logprobs.grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
@given(
    rows=st.lists(
        st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    ),
    data=st.data(),
)
def test_packing_and_order_do_not_matter(loss, rows, data):
    def run(order: list[int]) -> dict[int, list[float]]:
        flat = [(i, *token) for i in order for token in rows[i]]
        place = {i: n for n, i in enumerate(order)}
        batch = inputs(
            [x[1] for x in flat],
            [x[3] for x in flat],
            proximal=[x[2] for x in flat],
            sequence_ids=[place[x[0]] for x in flat],
        )
        values = loss(batch).loss.tolist()
        return {
            i: [v for v, x in zip(values, flat, strict=True) if x[0] == i] for i in range(len(rows))
        }

    together = run(list(range(len(rows))))
    shuffled = run(data.draw(st.permutations(range(len(rows)))))
    for i in range(len(rows)):
        assert shuffled[i] == pytest.approx(together[i], abs=1e-9)
        assert run([i, *range(i), *range(i + 1, len(rows))])[i] == pytest.approx(together[i])


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    cut=st.integers(0, 6),
    kind=st.sampled_from(["token_mean", "seq_mean", "constant_length"]),
)
def test_micro_batches_add_up(lengths, cut, kind):
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


def test_k3_on_the_old_policys_tokens_is_its_divergence_to_the_new():
    old, new = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (old * (old / new).log()).sum()
    assert float((old * k3(old.log(), new.log())).sum()) == pytest.approx(float(exact))


def test_k3_and_importance_weights():
    d = torch.tensor([0.0, 1.0, -1.0])
    assert k3(d, torch.zeros(3)).tolist() == pytest.approx([0.0, math.exp(-1), math.e - 2])
    weights = importance_weights(torch.tensor([0.0, 9.0]), torch.tensor([0.5, 0.0]))
    assert weights.tolist() == pytest.approx([math.exp(-0.5), 5.0])


# ---- advantages ------------------------------------------------------------------------------


def test_advantages_by_hand():
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    assert dr_grpo(rewards, ids).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0])
    assert rloo(rewards, ids).tolist() == pytest.approx([1.0, -0.5, -0.5, 0, 0])
    std = math.sqrt(1 / 3)
    assert grpo(rewards, ids).tolist() == pytest.approx(
        [2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 0, 0], rel=1e-5
    )
    assert reinforce(rewards, ids).tolist() == rewards.tolist()


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
@given(
    rewards=st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=4, max_size=12),
    shift=st.integers(-5, 5),
    data=st.data(),
)
def test_shift_and_order_do_not_matter(estimator, rewards, shift, data):
    ids = [i % 2 for i in range(len(rewards))]
    plain = estimator(torch.tensor(rewards), torch.tensor(ids)).tolist()
    shifted = estimator(torch.tensor(rewards) + shift, torch.tensor(ids)).tolist()
    assert shifted == pytest.approx(plain, rel=1e-3, abs=1e-2)
    order = data.draw(st.permutations(range(len(rewards))))
    moved = estimator(
        torch.tensor([rewards[i] for i in order]), torch.tensor([ids[i] for i in order])
    ).tolist()
    assert moved == pytest.approx([plain[i] for i in order])


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
@given(value=st.floats(-1e6, 1e6), size=st.integers(2, 9))
def test_a_group_of_equal_rewards_gets_exactly_zero(estimator, value, size):
    rewards = torch.full((size,), value, dtype=torch.float64)
    assert estimator(rewards, torch.zeros(size, dtype=torch.long)).tolist() == [0.0] * size


def test_returns_to_go_turn_by_turn():
    assert returns_to_go([]) == []
    assert returns_to_go([0.0, 1.0, 2.0]) == [3.0, 3.0, 2.0]
    assert returns_to_go([1.0, 0.0, 4.0], discount=0.5) == [2.0, 2.0, 4.0]


@given(rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=9), discount=st.floats(0, 1))
def test_returns_to_go_obey_their_recursion(rewards, discount):
    returns = returns_to_go(rewards, discount)
    assert returns[-1] == rewards[-1]
    for k in range(len(rewards) - 1):
        assert returns[k] == pytest.approx(rewards[k] + discount * returns[k + 1])


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_a_lonely_sibling_is_refused(estimator):
    with pytest.raises(ConfigError, match="only one member"):
        estimator(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1]))


# ---- the reference system's own numbers ------------------------------------------------------


@needs_golden
@pytest.mark.parametrize(
    ("key", "loss", "kwargs"),
    [
        ("ppo_sym_eps0.2", ppo_clip, {"clip_low": 0.2, "clip_high": 0.2}),
        ("ppo_cliphigher_0.2_0.28", ppo_clip, {"clip_low": 0.2, "clip_high": 0.28}),
        ("ppo_dualclip_eps0.2_c1.5", ppo_clip, {"clip_high": 0.2, "dual_clip": 1.5}),
        ("ppo_dualclip_eps0.2_c1.05", ppo_clip, {"clip_high": 0.2, "dual_clip": 1.05}),
        ("gspo_seq_eps0.2", gspo, {"clip_low": 0.2, "clip_high": 0.2}),
        ("cispo_1.0_4.0 (v2)", cispo, {"clip_low": 1.0, "clip_high": 4.0}),
        ("cispo_0.2_0.28 (v2)", cispo, {"clip_low": 0.2, "clip_high": 0.28}),
    ],
)
def test_agrees_with_the_reference(key, loss, kwargs):
    golden = json.loads(GOLDEN.read_text())
    given = {name: torch.tensor(values) for name, values in golden["inputs"].items()}
    mask = given["loss_mask"].bool()
    logprobs = given["logp"].clone().requires_grad_(True)
    sequence_ids = torch.arange(len(mask))[:, None].expand(mask.shape)[mask]
    output = loss(
        LossInputs(
            logprobs=logprobs[mask],
            proximal=given["prox_logp"][mask],
            old_logprobs=given["prox_logp"][mask],
            advantages=given["advantages"][mask],
            sequence_ids=sequence_ids,
        ),
        **kwargs,
    )
    weights = torch.tensor(aggregation_weights("token_mean", mask.sum(1).tolist()))
    total = aggregate(output.loss, weights[sequence_ids])
    total.backward()
    assert float(total.detach()) == pytest.approx(golden["losses"][key]["loss"], abs=1e-5)
    expected = torch.tensor(golden["losses"][key]["grad"])
    torch.testing.assert_close(logprobs.grad, expected, atol=1e-5, rtol=1e-5)


@needs_golden
@pytest.mark.parametrize(
    # The reference divides by std + 1e-5, we by std + 1e-6: that is the larger tolerance.
    ("key", "estimator", "tolerance"),
    [("group_none", dr_grpo, 1e-6), ("rloo", rloo, 1e-6), ("group_group", grpo, 5e-5)],
)
def test_advantages_agree_with_the_reference(key, estimator, tolerance):
    golden = json.loads(GOLDEN.read_text())["norm_1d"]
    rewards = torch.tensor(golden["x"])
    ids = torch.arange(len(rewards)) // golden["group_size"]
    assert estimator(rewards, ids).tolist() == pytest.approx(golden[key], abs=tolerance)


@needs_golden
def test_k3_agrees_with_the_reference():
    golden = json.loads(GOLDEN.read_text())
    found = k3(torch.tensor(golden["kl"]["k1"]), torch.zeros(()))
    # The reference clamps |d| at 2 in what it stores; we do not.
    is_small = torch.tensor(golden["kl"]["k1"]).abs() < 1.9
    expected = torch.tensor(golden["kl"]["k3"])
    torch.testing.assert_close(found[is_small], expected[is_small], atol=1e-5, rtol=1e-5)
