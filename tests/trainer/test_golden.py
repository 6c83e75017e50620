"""Agreement with the reference system's own functions, to 1e-5 where definitions coincide."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch

from areal_gym.trainer.algorithms.advantages import (
    AdvantageInputs,
    dr_grpo,
    estimate,
    grpo,
    lite_ppo,
    normalise,
    rloo,
)
from areal_gym.trainer.algorithms.corrections import (
    correct,
    interpolate_proximal,
    second_moment_mask,
)
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
from areal_gym.trainer.algorithms.ratios import KL_ESTIMATORS
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.batch.experience import overlong_penalty
from tests._support.paths import SHARED

GOLDEN = SHARED / "golden" / "losses.json"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="no ../shared/golden/losses.json")


@cache
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def inputs() -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in golden()["inputs"].items()}


SYMMETRIC = {"clip_low": 0.2, "clip_high": 0.2}
BAND = {"upper": 1.3, "lower": 0.8}
MASK = {"action": "mask"}
BY_SEQUENCE = {"level": "sequence"}


@pytest.mark.parametrize(
    ("key", "loss", "settings", "correction"),
    [
        ("ppo_sym_eps0.2", ppo_clip, SYMMETRIC, None),
        ("ppo_cliphigher_0.2_0.28", ppo_clip, {"clip_low": 0.2, "clip_high": 0.28}, None),
        ("ppo_dualclip_eps0.2_c1.5", ppo_clip, {"clip_high": 0.2, "dual_clip": 1.5}, None),
        ("ppo_dualclip_eps0.2_c1.05", ppo_clip, {"clip_high": 0.2, "dual_clip": 1.05}, None),
        ("gspo_seq_eps0.2", gspo, SYMMETRIC, None),
        ("cispo_1.0_4.0 (v2)", cispo, {"clip_low": 1.0, "clip_high": 4.0}, None),
        ("cispo_0.2_0.28 (v2)", cispo, {"clip_low": 0.2, "clip_high": 0.28}, None),
        ("sapo_token_1.0_1.05", sapo, {}, None),
        ("sapo_seq_1.0_1.05", sapo, BY_SEQUENCE, None),
        *(
            (f"decoupled_{name}", ppo_clip, SYMMETRIC, correction)
            for name, correction in (
                ("ratio_token_mask_upper1.3_lower0.8", MASK | BAND),
                ("ratio_token_clamp_upper1.3_lower0.8", BAND),
                ("ratio_sequence_mask_upper1.3_lower0.8", BY_SEQUENCE | MASK | BAND),
                ("ratio_sequence_clamp_upper1.3_lower0.8", BY_SEQUENCE | BAND),
                ("ratio_token_mask_upper5", MASK | {"upper": 5.0}),
                *(
                    (
                        f"ratio_seq_mask_{statistic}_upper1.3",
                        BY_SEQUENCE | MASK | {"upper": 1.3, "statistic": statistic},
                    )
                    for statistic in ("sum", "mean", "max")
                ),
                ("kl_k1_token_mask_upper0.2", MASK | {"measure": "k1", "upper": 0.2}),
                ("kl_k2_token_mask_upper0.05", MASK | {"measure": "k2", "upper": 0.05}),
                ("kl_k3_token_mask_upper0.05", MASK | {"measure": "k3", "upper": 0.05}),
                (
                    "binary_kl_token_mask_upper0.05 (v2)",
                    MASK | {"measure": "binary_kl", "upper": 0.05},
                ),
            )
        ),
    ],
)
def test_golden_losses_and_gradients(key, loss, settings, correction):
    given, expected = inputs(), golden()["losses"][key]
    mask = given["loss_mask"].bool()
    logprobs = given["logp"].clone().requires_grad_(True)
    ids_T = torch.arange(len(mask))[:, None].expand(mask.shape)[mask]
    # SAPO's ratio there is against the behaviour policy.
    proximal = given["old_logp" if loss is sapo else "prox_logp"]
    batch = LossInputs(
        logprobs=logprobs[mask],
        proximal=proximal[mask],
        old_logprobs=given["old_logp"][mask],
        advantages=given["advantages"][mask],
        sequence_ids=ids_T,
    )
    loss_T = loss(batch, **settings).loss
    if correction is not None:
        found = correct(batch.proximal, batch.old_logprobs, ids_T, **correction)
        loss_T = found.weights * loss_T
        share = float(found.metrics["corrected_fraction"].mean())
        assert share == pytest.approx(expected["filtered_fraction"], abs=1e-5)
    weights = torch.tensor(aggregation_weights("token_mean", mask.sum(1).tolist()))
    total = aggregate(loss_T, weights[ids_T])
    total.backward()
    assert float(total.detach()) == pytest.approx(expected["loss"], abs=1e-5)
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected["grad"]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threshold", ["0.04", "0.01", "1e-09"])
def test_golden_m2po_mask(threshold):
    given = inputs()
    mask = given["loss_mask"].bool()
    found = torch.zeros(mask.shape, dtype=torch.long)
    found[mask] = second_moment_mask(
        given["prox_logp"][mask], given["old_logp"][mask], threshold=float(threshold)
    ).long()
    expected = torch.tensor(golden()[f"m2po_mask_{threshold}"])
    if threshold == "1e-09":
        # Deliberately different: there one token always stays, though it is beyond the threshold.
        assert expected.sum() == 1
        expected = torch.zeros_like(expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_golden_kl_estimators(kind):
    given = inputs()
    found = KL_ESTIMATORS[kind](given["old_logp"], given["prox_logp"])
    torch.testing.assert_close(found, torch.tensor(golden()["kl"][kind]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["loglinear", "linear"])
def test_golden_interpolated_proximal_policies(kind):
    given, expected = inputs(), golden()["prox_approx"]
    versions = torch.tensor(expected["versions"])
    found = interpolate_proximal(
        given["logp"],
        given["old_logp"],
        versions,
        proximal_version=expected["current_version"] - 1,
        current_version=expected["current_version"],
        kind=kind,
    )
    is_sampled = versions >= 0
    torch.testing.assert_close(
        found[is_sampled], torch.tensor(expected[kind])[is_sampled], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    # The reference divides by std + 1e-5, we by std + 1e-6: that is the larger tolerance.
    ("key", "estimator", "tolerance"),
    [
        ("group_none", dr_grpo, 1e-5),
        ("rloo", rloo, 1e-5),
        ("group_group", grpo, 5e-5),
        ("group_batch", lite_ppo, 5e-5),
        ("batch_batch", lambda rewards, ids: normalise(rewards), 5e-5),
    ],
)
def test_golden_advantages(key, estimator, tolerance):
    expected = golden()["norm_1d"]
    rewards = torch.tensor(expected["x"])
    ids = torch.arange(len(rewards)) // expected["group_size"]
    assert estimator(rewards, ids).tolist() == pytest.approx(expected[key], abs=tolerance)


def test_golden_normalised_tokens():
    given = inputs()
    mask = given["loss_mask"].bool()
    expected = torch.tensor(golden()["norm_2d_masked_batch"])[mask].double()
    found = normalise(given["advantages"][mask])
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("token_d1.0_l1.0", {}),
        ("token_d0.9_l0.95", {"discount": 0.9, "lam": 0.95}),
        ("turn_d1.0_l1.0 (v2)", {"unit": "turn"}),
        ("turn_d0.9_l0.95 (v2)", {"unit": "turn", "discount": 0.9, "lam": 0.95}),
    ],
)
def test_golden_generalised_advantages(key, settings):
    given = golden()["gae"]
    mask = torch.tensor(given["loss_mask_rolled"]).bool()
    turns = torch.tensor(given["turn_ids_rolled"])
    ids = torch.arange(len(mask))[:, None].expand(mask.shape)
    batch = AdvantageInputs(
        rewards_G=torch.tensor(given["rewards"]).sum(1),
        group_ids_G=torch.arange(len(mask)),
        rewards_T=torch.tensor(given["rewards"])[mask],
        trajectory_ids_T=ids[mask],
        turn_ids_T=turns[mask],
        values_T=torch.tensor(given["values"])[mask],
    )
    found = estimate(gae, batch, **settings)
    advantages, returns = (torch.tensor(given[key][name])[mask] for name in ("adv", "ret"))
    torch.testing.assert_close(found.advantages_T, advantages.double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.returns_T, returns.double(), atol=1e-5, rtol=1e-5)


def test_golden_overlong_penalty():
    given = golden()["overlong"]
    penalties = overlong_penalty(
        torch.tensor(given["resp_lens"]),
        max_length=given["max_response_length"],
        tail=given["overlong_tokens"],
        factor=given["factor"],
    )
    assert (torch.tensor(given["rewards"]) + penalties).tolist() == pytest.approx(given["out"])


def test_golden_value_loss():
    given = golden()["critic"]
    values, old, target = (torch.tensor(given[name]) for name in ("value", "old", "target"))
    found = value_loss(values, old, target, clip=given["eps"]).mean()
    assert float(found) == pytest.approx(given["loss"], abs=1e-5)
