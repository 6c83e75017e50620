from __future__ import annotations

import inspect
import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.errors import ConfigError, NotFiniteError, TrainError
from areal_gym.plugins import registry
from areal_gym.trainer.algorithms.advantages import (
    AdvantageInputs,
    dr_grpo,
    estimate,
    grpo,
    lite_ppo,
    normalise,
    reinforce,
    returns_to_go,
    rloo,
)
from areal_gym.trainer.algorithms.token_advantages import (
    BASELINES,
    BaselineName,
    _discounted_sums,
    gae,
    per_turn,
    reinforce_pp,
    reinforce_pp_baseline,
)


def test_advantages_by_hand():
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    assert dr_grpo(rewards, ids).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0])
    assert rloo(rewards, ids).tolist() == pytest.approx([1.0, -0.5, -0.5, 0, 0])
    std = math.sqrt(1 / 3)
    assert grpo(rewards, ids).tolist() == pytest.approx(
        [2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 0, 0], rel=1e-5
    )
    assert reinforce(rewards, ids).tolist() == rewards.tolist()


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, lite_ppo])
@given(
    rewards=st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=4, max_size=12),
    shift=st.integers(-5, 5),
    data=st.data(),
)
def test_advantages_are_invariant_to_shift_and_order(estimator, rewards, shift, data):
    ids = [i % 2 for i in range(len(rewards))]
    plain = estimator(torch.tensor(rewards), torch.tensor(ids)).tolist()
    shifted = estimator(torch.tensor(rewards) + shift, torch.tensor(ids)).tolist()
    assert shifted == pytest.approx(plain, rel=1e-3, abs=1e-2)
    order = data.draw(st.permutations(range(len(rewards))))
    moved = estimator(
        torch.tensor([rewards[i] for i in order]), torch.tensor([ids[i] for i in order])
    ).tolist()
    assert moved == pytest.approx([plain[i] for i in order])


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, lite_ppo])
@given(value=st.floats(-1e6, 1e6), size=st.integers(2, 9))
def test_equal_rewards_give_exactly_zero(estimator, value, size):
    rewards = torch.full((size,), value, dtype=torch.float64)
    assert estimator(rewards, torch.zeros(size, dtype=torch.long)).tolist() == [0.0] * size


def test_returns_to_go_by_hand():
    assert returns_to_go([]) == []
    assert returns_to_go([0.0, 1.0, 2.0]) == [3.0, 3.0, 2.0]
    assert returns_to_go([1.0, 0.0, 4.0], discount=0.5) == [2.0, 2.0, 4.0]


@given(
    runs=st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=9), max_size=6),
    discount=st.floats(0, 1),
)
def test_sums_of_all_runs_at_once_are_those_of_a_loop_bit_for_bit(runs, discount):
    values = torch.tensor([value for run in runs for value in run], dtype=torch.float64)
    counts = torch.tensor([len(run) for run in runs], dtype=torch.long)
    expected = [value for run in runs for value in returns_to_go(run, discount)]
    assert _discounted_sums(values, counts, discount).tolist() == expected


@given(rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=9), discount=st.floats(0, 1))
def test_returns_to_go_obey_their_recursion(rewards, discount):
    returns = returns_to_go(rewards, discount)
    assert returns[-1] == rewards[-1]
    for k in range(len(rewards) - 1):
        assert returns[k] == pytest.approx(rewards[k] + discount * returns[k + 1])


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, lite_ppo])
def test_group_of_one_is_refused(estimator):
    with pytest.raises(ConfigError, match="only one member"):
        estimator(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1]))


def test_lite_ppo_by_hand():
    rewards, ids = torch.tensor([3.0, 1.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    std = math.sqrt((1 + 1) / 3)  # of 1, -1, 0, 0: a whole batch's, not a group's
    assert lite_ppo(rewards, ids).tolist() == pytest.approx([1 / std, -1 / std, 0, 0], rel=1e-5)
    assert lite_ppo(torch.ones(4), ids).tolist() == [0.0] * 4


def test_normalise_by_hand():
    assert normalise(torch.tensor([1.0, 3.0])).tolist() == pytest.approx(
        [-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-5
    )
    # Noise in place of rewards stays small: sqrt(var + 1e-8), as verl.
    noise = normalise(torch.tensor([0.0, 1e-5], dtype=torch.float64))
    assert noise.tolist() == pytest.approx([-0.0499, 0.0499], abs=1e-4)
    assert normalise(torch.tensor([0.1] * 7)).tolist() == [0.0] * 7
    assert normalise(torch.tensor([])).tolist() == []


# ---- per token and per turn ------------------------------------------------------------------


def two_turns(**critic) -> AdvantageInputs:
    """Siblings: one of two turns (2 and 1 tokens, rewards 1 and 3), one of a single token."""
    return AdvantageInputs.from_turns([[1.0, 3.0], [2.0]], [[2, 1], [1]], [0, 0], **critic)


def test_rewards_are_placed_on_the_last_token_of_their_turn():
    inputs = two_turns()
    assert inputs.rewards_G.tolist() == [4.0, 2.0]
    assert inputs.rewards_T.tolist() == [0.0, 1.0, 3.0, 2.0]
    assert inputs.trajectory_ids_T.tolist() == [0, 0, 0, 1]
    assert inputs.turn_ids_T.tolist() == [0, 0, 1, 0]


def test_reward_of_an_empty_turn_goes_to_the_previous_token():
    inputs = AdvantageInputs.from_turns([[1.0, 2.0, 4.0], [8.0, 1.0]], [[0, 2, 0], [0, 1]], [0, 0])
    assert inputs.rewards_G.tolist() == [7.0, 9.0]
    assert inputs.rewards_T.tolist() == [0.0, 6.0, 1.0]  # nobody sampled a token for the first 8


def test_gae_per_token_by_hand():
    values = torch.tensor([0.5, 1.0, 2.0, 4.0])
    found = estimate(gae, two_turns(values_T=values), discount=0.5, lam=0.5)
    # Of the last token backwards: 3 - 2; 1 + 0.5 * 2 - 1 + 0.25 * 1; 0.5 * 1 - 0.5 + 0.25 * 1.25
    assert found.advantages_T.tolist() == pytest.approx([0.3125, 1.25, 1.0, -2.0])
    assert found.returns_T.tolist() == pytest.approx([0.8125, 2.25, 3.0, 2.0])


def test_gae_per_turn_by_hand():
    values = torch.tensor([0.5, 9.0, 2.0, 4.0])  # 9 is inside a turn: nobody asks for it
    found = estimate(gae, two_turns(values_T=values), discount=0.5, lam=0.5, unit="turn")
    # 3 - 2; then 1 + 0.5 * 2 - 0.5 + 0.25 * 1
    assert found.advantages_T.tolist() == pytest.approx([1.75, 1.75, 1.0, -2.0])
    assert found.returns_T.tolist() == pytest.approx([2.25, 2.25, 3.0, 2.0])


def test_gae_bootstraps_truncated_rows():
    values, last = torch.zeros(4), torch.tensor([10.0, 0.0])
    found = estimate(gae, two_turns(values_T=values, final_values_G=last), discount=0.5, lam=0.0)
    assert found.advantages_T.tolist() == [0.0, 1.0, 3.0 + 5.0, 2.0]


@given(
    rewards=st.lists(st.floats(-3, 3), min_size=1, max_size=6),
    values=st.lists(st.floats(-3, 3), min_size=6, max_size=6),
    discount=st.floats(0.1, 1),
)
def test_gae_with_lambda_one_is_return_minus_value(rewards, values, discount):
    values_T = torch.tensor(values[: len(rewards)], dtype=torch.float64)
    inputs = AdvantageInputs.from_turns([rewards], [[1] * len(rewards)], [0], values_T=values_T)
    for unit in ("token", "turn"):
        found = estimate(gae, inputs, discount=discount, lam=1.0, unit=unit)
        expected = returns_to_go(rewards, discount)
        assert found.returns_T.tolist() == pytest.approx(expected)
        assert (found.advantages_T + values_T).tolist() == pytest.approx(expected)


def test_normalised_gae_keeps_critic_targets():
    plain, scaled = (
        estimate(gae, two_turns(values_T=torch.zeros(4)), is_normalised=is_normalised)
        for is_normalised in (False, True)
    )
    assert scaled.returns_T.tolist() == plain.returns_T.tolist()
    assert float(scaled.advantages_T.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(scaled.advantages_T.std()) == pytest.approx(1.0, abs=1e-5)


def test_reinforce_pp_by_hand():
    # Returns from each token on: 4, 4, 3 and 2.
    found = estimate(reinforce_pp, two_turns()).advantages_T
    std = math.sqrt((0.75**2 + 0.75**2 + 0.25**2 + 1.25**2) / 3)
    assert found.tolist() == pytest.approx([x / std for x in (0.75, 0.75, -0.25, -1.25)], rel=1e-5)


def test_reinforce_pp_baseline_by_hand():
    # 1 for three tokens, -1 for one: mean 0.5, deviation 1.
    found = estimate(reinforce_pp_baseline, two_turns()).advantages_T
    assert found.tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], rel=1e-5)


def test_per_turn_by_hand():
    inputs = two_turns()
    # Against the sibling's whole return, 2.
    found = estimate(per_turn, inputs, baseline="rloo").advantages_T
    assert found.tolist() == pytest.approx([4 - 2, 4 - 2, 3 - 2, 2 - 4])
    halved = estimate(per_turn, inputs, baseline="rloo", discount=0.5).advantages_T
    assert halved.tolist() == pytest.approx([2.5 - 2, 2.5 - 2, 3 - 2, 2 - 2.5])
    # The sibling has no second turn.
    by_turn = estimate(per_turn, inputs, baseline="rloo", by="turn").advantages_T
    assert by_turn.tolist() == pytest.approx([4 - 2, 4 - 2, 0, 2 - 4])


@given(
    rewards=st.lists(st.floats(-3, 3).map(lambda x: round(x, 2)), min_size=4, max_size=7),
    turns=st.lists(st.integers(1, 3), min_size=7, max_size=7),
)
@pytest.mark.parametrize("baseline", [grpo, dr_grpo, rloo, reinforce])
def test_per_turn_with_final_reward_only_equals_the_baseline(baseline, rewards, turns):
    lengths = [[2] * n for n in turns[: len(rewards)]]
    inputs = AdvantageInputs.from_turns(
        [[0.0] * (len(n) - 1) + [r] for r, n in zip(rewards, lengths, strict=True)],
        lengths,
        [i % 2 for i in range(len(rewards))],
    )
    found = estimate(per_turn, inputs, baseline=baseline).advantages_T
    assert found.tolist() == pytest.approx(estimate(baseline, inputs).advantages_T.tolist())


def test_penalties_are_token_rewards_or_subtracted_from_advantages():
    penalties = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    inputs = two_turns(penalties_T=penalties)
    # An estimator that looks at rewards of tokens finds them there.
    found = estimate(reinforce_pp, inputs).advantages_T
    returns = normalise(torch.tensor([4 - 0.6, 4 - 0.5, 3 - 0.3, 2 - 0.4]))
    assert found.tolist() == pytest.approx(returns.tolist())
    # Of the others' advantages go the token's own and all that follow.
    plain = estimate(grpo, two_turns()).advantages_T
    found = estimate(grpo, inputs).advantages_T
    assert (plain - found).tolist() == pytest.approx([0.6, 0.5, 0.3, 0.4])


def test_unknown_baseline_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="baseline = 'rlooo': it is one of 'grpo'") as error:
        estimate(per_turn, two_turns(), baseline="rlooo")
    assert "rloo" in error.value.hints[0]
    assert set(get_args(BaselineName)) == BASELINES.keys()


# ---- what `estimate` refuses -----------------------------------------------------------------


def test_gae_without_critic_is_refused():
    with pytest.raises(ConfigError, match="needs values_T, but the trainer has no critic"):
        estimate(gae, two_turns())


def test_unknown_estimator_settings_are_refused():
    with pytest.raises(ConfigError, match="takes no setting 'lamb'") as error:
        estimate(gae, two_turns(values_T=torch.zeros(4)), lamb=0.9)
    assert "lam" in error.value.hints[0]
    with pytest.raises(ConfigError, match="takes no setting") as error:
        estimate(grpo, two_turns(), eps=1)
    assert error.value.hints == ("it takes: none",)


def test_plugin_estimators_are_checked():
    def short(rewards_G, group_ids_G):
        return rewards_G[:1]

    def endless(rewards_G, group_ids_G, *, rewards_T):
        return rewards_T / 0

    with pytest.raises(TrainError, match="not one per trajectory"):
        estimate(short, two_turns())
    with pytest.raises(TrainError, match="not finite"):
        estimate(endless, two_turns())


def _registered():
    return sorted(spec.id for spec in registry().entries("advantages"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", _registered())
def test_every_estimator_refuses_nonfinite_rewards(name, bad):
    estimator = registry().load("advantages", name)
    keywords = inspect.signature(estimator).parameters
    names = ("values_T", "old_logprobs_T", "teacher_logprobs_T", "answer_probs_T")
    critic = {key: torch.zeros(6) for key in names}

    def inputs(reward, **further):
        rewards = [[1.0, 2.0], [reward, 0.0], [3.0]]
        if "role_means_G" in keywords:
            further["role_means_G"] = torch.zeros(3)
        return AdvantageInputs.from_turns(
            rewards, [[1, 1], [1, 2], [1]], [0, 0, 0], **{**critic, **further}
        )

    estimate(estimator, inputs(1.0))
    with pytest.raises(NotFiniteError, match="not finite"):
        estimate(estimator, inputs(bad))
    for key in set(critic) & set(keywords):
        broken = critic[key].clone()
        broken[3] = bad
        with pytest.raises(NotFiniteError, match=key):
            estimate(estimator, inputs(1.0, **{key: broken}))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, lite_ppo, reinforce])
def test_direct_estimator_calls_refuse_nonfinite_rewards(estimator, bad):
    for rewards in ([bad, bad], [bad, 1.0], [0.0, bad]):
        with pytest.raises(NotFiniteError, match=estimator.__name__):
            estimator(torch.tensor(rewards), torch.tensor([0, 0]))
