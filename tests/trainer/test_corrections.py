"""The weights of stale tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.corrections import (
    correct,
    interpolate_proximal,
    second_moment_mask,
)

# Weights 2 and 8 in one sequence (geometric mean 4), and 0.25 alone.
LOG_WEIGHTS = torch.tensor([2.0, 8.0, 0.25], dtype=torch.float64).log()
OLD = torch.tensor([-2.5, -3.0, -0.1], dtype=torch.float64)
IDS = torch.tensor([0, 0, 1])


def weights(**settings) -> list[float]:
    return correct(OLD + LOG_WEIGHTS, OLD, IDS, **settings).weights.tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [2.0, 5.0, 0.25]),
        ({"upper": None}, [2.0, 8.0, 0.25]),
        ({"upper": None, "lower": 0.5}, [2.0, 8.0, 0.5]),
        ({"action": "mask"}, [2.0, 0.0, 0.25]),
        ({"action": "mask", "lower": 0.5}, [2.0, 0.0, 0.0]),
        ({"level": "sequence"}, [4.0, 4.0, 0.25]),
        ({"level": "sequence", "upper": 3.0, "lower": 0.5}, [3.0, 3.0, 0.5]),
        ({"level": "sequence", "action": "mask"}, [4.0, 4.0, 0.25]),
        ({"level": "sequence", "action": "mask", "statistic": "max"}, [0.0, 0.0, 0.25]),
        ({"level": "sequence", "action": "mask", "statistic": "sum"}, [0.0, 0.0, 0.25]),
        ({"action": "mask", "measure": "k1", "upper": 1.0}, [2.0, 0.0, 0.25]),
        ({"action": "mask", "measure": "k2", "upper": 0.5}, [2.0, 0.0, 0.0]),
        ({"action": "mask", "measure": "k3", "upper": 0.5}, [2.0, 0.0, 0.0]),
    ],
)
def test_corrections_by_hand(settings, expected):
    assert weights(**settings) == pytest.approx(expected)


def test_k3_of_a_weight_is_w_minus_1_minus_log_w():
    found = correct(OLD + LOG_WEIGHTS, OLD, IDS).metrics["stale_k3"]
    assert found.tolist() == pytest.approx([w - 1 - math.log(w) for w in (2.0, 8.0, 0.25)])


def test_clipped_fractions_count_tokens_outside_the_bounds():
    found = correct(OLD + LOG_WEIGHTS, OLD, IDS, lower=0.5, upper=5.0)
    assert found.metrics["corrected_fraction"].tolist() == [0.0, 1.0, 1.0]
    assert found.metrics["stale_ratio"].tolist() == pytest.approx([2.0, 8.0, 0.25])


def test_correction_weights_have_no_gradient():
    proximal = (OLD + LOG_WEIGHTS).requires_grad_()
    found = correct(proximal, OLD, IDS)
    assert not found.weights.requires_grad
    assert not any(values.requires_grad for values in found.metrics.values())


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("action", ["truncate", "mask"])
def test_on_policy_tokens_have_weight_one(level, action):
    found = correct(OLD, OLD, IDS, level=level, action=action, lower=0.5)
    assert found.weights.tolist() == [1.0, 1.0, 1.0]
    assert found.metrics["corrected_fraction"].sum() == 0


@given(
    log_weights=st.lists(st.floats(-40, 40), min_size=1, max_size=8),
    level=st.sampled_from(["token", "sequence"]),
    action=st.sampled_from(["truncate", "mask"]),
    data=st.data(),
)
def test_weights_are_finite_bounded_and_independent_of_order(log_weights, level, action, data):
    old_T = torch.full((len(log_weights),), -50.0, dtype=torch.float64)
    log_weights_T = torch.tensor(log_weights, dtype=torch.float64)
    ids_T = torch.arange(len(log_weights)) // 2

    def run(order: list[int]) -> list[float]:
        _, ids = torch.unique(ids_T[order], return_inverse=True)
        proximal_T = (old_T + log_weights_T)[order]
        return correct(
            proximal_T, old_T[order], ids, level=level, action=action, lower=0.5, upper=2.0
        ).weights.tolist()

    plain = run(list(range(len(log_weights))))
    assert all(0.5 <= w <= 2.0 or (action == "mask" and w == 0) for w in plain)
    order = data.draw(st.permutations(range(len(log_weights))))
    assert run(order) == pytest.approx([plain[i] for i in order])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"measure": "k3"}, "cannot truncate"),
        ({"statistic": "max"}, "only to masks of sequences"),
        ({"lower": 5.0}, "must be below upper"),
        ({"upper": 0.0}, "weights are positive"),
        ({"action": "mask", "upper": None}, "masks nothing"),
    ],
)
def test_contradictory_corrections_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        weights(**settings)


# ---- M2PO ------------------------------------------------------------------------------------


def mask(squares: list[float], threshold: float) -> list[float]:
    old = torch.zeros(len(squares))
    return second_moment_mask(torch.tensor(squares).sqrt(), old, threshold=threshold).tolist()


def test_m2po_masks_furthest_tokens_until_the_mean_is_small():
    # Means of the nearest one, two, three and four: 0, 0.02, 0.1, 1.
    assert mask([0.26, 0.0, 3.7, 0.04], 0.1) == [1, 1, 0, 1]
    assert mask([0.26, 0.0, 3.7, 0.04], 0.04) == [0, 1, 0, 1]
    assert mask([0.26, 0.0, 3.7, 0.04], 2.0) == [1, 1, 1, 1]
    assert mask([0.5, 0.5], 0.1) == [0, 0]
    assert mask([0.0, 0.5, 0.5], 0.3) == [1, 0, 0]  # equals share their fate: 0.25 would do
    with pytest.raises(ConfigError, match="above 0"):
        mask([1.0], 0.0)


@given(
    squares=st.lists(st.floats(0, 4).map(lambda x: round(x, 3)), min_size=1, max_size=9),
    threshold=st.floats(0.01, 2),
)
def test_m2po_keeps_the_nearest_tokens_within_the_threshold(squares, threshold):
    kept = [s for s, m in zip(squares, mask(squares, threshold), strict=True) if m]
    gone = [s for s, m in zip(squares, mask(squares, threshold), strict=True) if not m]
    assert not kept or sum(kept) / len(kept) <= threshold + 1e-6
    assert not kept or not gone or max(kept) < min(gone)
    assert kept or min(squares) > threshold - 1e-6 or squares.count(min(squares)) > 1


# ---- the proximal policy without a forward pass ----------------------------------------------


@pytest.mark.parametrize(("kind", "middle"), [("loglinear", -2.0), ("linear", None)])
def test_proximal_policy_is_interpolated_by_version(kind, middle):
    old, now = torch.tensor([-3.0] * 3), torch.tensor([-1.0] * 3)
    found = interpolate_proximal(
        now, old, torch.tensor([2, 3, 4]), proximal_version=3, current_version=4, kind=kind
    )
    expected = middle or math.log((math.exp(-3) + math.exp(-1)) / 2)
    # Half way for a token of version 2; those of the proximal version, or newer, stay.
    assert found.tolist() == pytest.approx([expected, -3.0, -3.0])


def test_interpolation_between_equal_versions_is_refused():
    with pytest.raises(ConfigError, match="must come before"):
        interpolate_proximal(
            torch.zeros(1), torch.zeros(1), torch.zeros(1), proximal_version=4, current_version=4
        )
