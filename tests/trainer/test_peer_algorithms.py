"""Losses and estimators of other systems: by hand, and to 1e-5 as verl's own functions.

`verl_numbers.json` holds what the functions of `verl/trainer/ppo/core_algos.py` (August 2026) gave
for a batch of six ragged sequences in two groups; losses are named by their settings.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.plugins import registry
from areal_gym.testing import check_advantage_estimator, check_policy_loss
from areal_gym.trainer.algorithms.advantages import AdvantageInputs, estimate
from areal_gym.trainer.algorithms.losses import (
    LossInputs,
    LossOutput,
    aggregate,
    aggregation_weights,
    with_batch_pass,
)
from areal_gym.trainer.batch.experience import length_penalised
from areal_gym.trainer.checkpoint import restore_trainer, save_trainer
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Group, Task
from tests._support.tiny_training import batch, honest_logprobs, tiny_decoder

NUMBERS: dict[str, Any] = json.loads((Path(__file__).parent / "verl_numbers.json").read_text())
MASK = torch.tensor(NUMBERS["mask"]).bool()
LENGTHS = MASK.sum(1).tolist()


def loss_of(name: str) -> Any:
    return registry().load("losses", name)


def estimator_of(name: str) -> Any:
    return registry().load("advantages", name)


def verl_batch() -> LossInputs:
    def flat(name: str) -> torch.Tensor:
        return torch.tensor(NUMBERS[name])[MASK]

    return LossInputs(
        logprobs=flat("logp").requires_grad_(True),
        proximal=flat("old_logp"),
        old_logprobs=flat("old_logp"),
        advantages=flat("advantages"),
        sequence_ids=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
    )


@pytest.mark.parametrize(
    ("case", "name", "settings", "aggregation"),
    [
        ("dppo_tv 0.2 0.2", "dppo_tv", {}, "token_mean"),
        (
            "dppo_tv 0.15 0.05 c1.5",
            "dppo_tv",
            {"clip_low": 0.15, "clip_high": 0.05, "truncation": 1.5},
            "token_mean",
        ),
        ("dppo_kl 0.2 0.2", "dppo_kl", {}, "seq_mean"),
        ("dppo_kl 0.05 0.02", "dppo_kl", {"clip_low": 0.05, "clip_high": 0.02}, "token_mean"),
        ("gmpo 0.2 0.2", "gmpo", {}, "seq_mean"),
        ("gmpo 0.4 0.3", "gmpo", {"clip_low": 0.4, "clip_high": 0.3}, "seq_mean"),
        ("gpg", "gpg", {}, "token_mean"),
        ("dro 0.3", "dro", {"beta": 0.3}, "token_mean"),
        ("clip_cov all", "clip_cov", {"cov_fraction": 1.0, "cov_low": 0.2}, "token_mean"),
        ("kl_cov one", "kl_cov", {}, "token_mean"),
        ("kl_cov third", "kl_cov", {"cov_fraction": 1 / 3, "kl_coefficient": 1.0}, "token_mean"),
    ],
)
def test_losses_agree_with_verl(case, name, settings, aggregation):
    inputs = verl_batch()
    weights_G = torch.tensor(aggregation_weights(aggregation, LENGTHS))
    loss = aggregate(loss_of(name)(inputs, **settings).loss, weights_G[inputs.sequence_ids])
    loss.backward()
    expected = NUMBERS["losses"][case]
    assert float(loss.detach()) == pytest.approx(expected["loss"], abs=1e-5)
    gradient_T = torch.tensor(expected["gradient"])[MASK]
    torch.testing.assert_close(inputs.logprobs.grad, gradient_T, rtol=1e-5, atol=1e-5)


def test_clip_cov_picks_one_of_the_tokens_that_verl_may_pick():
    inputs = verl_batch()
    loss_T = loss_of("clip_cov")(inputs).loss.detach()
    all_T = loss_of("clip_cov")(inputs, cov_fraction=1.0).loss.detach()
    assert int((loss_T == 0).sum()) == 1
    assert (all_T[loss_T == 0] == 0).all()


@pytest.mark.parametrize(
    ("case", "name", "settings"),
    [
        ("opo", "opo", {}),
        ("gpg", "gpg", {}),
        ("grpo_passk", "pass_at_k", {}),
        ("grpo_passk plain", "pass_at_k", {"is_normalised": False}),
        ("gdpo", "gdpo", {}),
        ("gdpo 1 0.5", "gdpo", {"weights": {"right": 1.0, "format": 0.5}}),
    ],
)
def test_estimators_agree_with_verl(case, name, settings):
    inputs = AdvantageInputs.from_turns(
        [[reward] for reward in NUMBERS["rewards"]],
        [[n] for n in LENGTHS],
        NUMBERS["groups"],
        reward_parts_G={k: torch.tensor(v) for k, v in NUMBERS["reward_parts"].items()},
    )
    advantages_T = estimate(estimator_of(name), inputs, **settings).advantages_T
    expected_T = torch.tensor(NUMBERS["estimators"][case])[MASK].double()
    torch.testing.assert_close(advantages_T, expected_T, rtol=1e-5, atol=1e-5)


# ---- by hand ---------------------------------------------------------------------------------


def tokens(probs: list[float], before: list[float], advantages: list[float]) -> LossInputs:
    proximal_T = torch.tensor(before, dtype=torch.float64).log()
    return LossInputs(
        logprobs=torch.tensor(probs, dtype=torch.float64).log().requires_grad_(True),
        proximal=proximal_T,
        old_logprobs=proximal_T,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sequence_ids=torch.zeros(len(probs), dtype=torch.long),
    )


def test_dppo_bounds_probabilities_and_not_ratios():
    # A rare token triples its probability and stays; a likely one moves by 0.25 and is out.
    rare, likely, back, down = (0.03, 0.01), (0.85, 0.6), (0.3, 0.6), (0.3, 0.6)
    pairs, advantages = (rare, likely, back, down), [2.0, 1.0, 1.0, -1.0]
    inputs = tokens([p for p, _ in pairs], [q for _, q in pairs], advantages)
    output = loss_of("dppo_tv")(inputs, clip_low=0.2, clip_high=0.2)
    expected = [-2 * 3 * math.log(0.03), 0.0, -0.5 * math.log(0.3), 0.0]
    assert output.loss.tolist() == pytest.approx(expected)
    assert output.metrics["clip_fraction"].tolist() == [0, 1, 0, 1]
    truncated = loss_of("dppo_tv")(inputs, truncation=2.0)
    assert float(truncated.loss[0].detach()) == pytest.approx(-2 * 2 * math.log(0.03))
    assert truncated.metrics["truncated_fraction"].tolist() == [1, 0, 0, 0]
    # KL(0.6 || 0.85) = 0.6 log(0.6/0.85) + 0.4 log(0.4/0.15) = 0.183; the rare token's is 0.009.
    for bound, num_out in ((0.18, 1), (0.19, 0)):
        output = loss_of("dppo_kl")(inputs, clip_low=0.3, clip_high=bound)
        assert output.metrics["clip_fraction"].sum() == num_out


def test_gmpo_by_hand():
    # Log-ratios log 2 (clipped to 0.4) and -1 (not clipped where the advantage is positive).
    inputs = tokens([0.6, 0.2], [0.3, 0.2 * math.e], [1.5, 1.5])
    output = loss_of("gmpo")(inputs, clip_low=0.4, clip_high=0.4)
    assert output.loss.tolist() == pytest.approx([-1.5 * math.exp((0.4 - 1) / 2)] * 2)
    assert output.metrics["clip_fraction"].tolist() == [1, 0]
    inputs = tokens([0.6, 0.2], [0.3, 0.2 * math.e], [-1.5, -1.5])
    output = loss_of("gmpo")(inputs, clip_low=0.4, clip_high=0.4)
    assert output.loss.tolist() == pytest.approx([1.5 * math.exp((math.log(2) - 0.4) / 2)] * 2)


def test_dro_by_hand_has_its_minimum_at_the_advantage_over_beta():
    inputs = tokens([0.5 * math.exp(0.4)], [0.5], [0.2])
    output = loss_of("dro")(inputs, beta=0.5)
    logprob = math.log(0.5) + 0.4
    assert output.loss.tolist() == pytest.approx([-(0.2 * logprob - 0.25 * 0.16)])
    output.loss.sum().backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([0.0])


def test_clip_cov_and_kl_cov_by_hand():
    # Mean log-probability -2, mean advantage 0.
    logprobs, advantages = [-1.0, -0.5, -3.0, -3.5], [2.0, 1.0, -1.0, -2.0 / 6]
    mean = sum(advantages) / 4
    advantages = [a - mean for a in advantages]
    inputs = LossInputs(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        proximal=torch.tensor([-1.0, -1.5, -3.0, -3.4]),
        old_logprobs=torch.zeros(4),
        advantages=torch.tensor(advantages),
        sequence_ids=torch.zeros(4, dtype=torch.long),
    )
    covariances = [a * (x + 2) for a, x in zip(advantages, logprobs, strict=True)]
    settings = {"cov_fraction": 0.99, "cov_low": 0.7, "cov_high": 5.0}
    output = loss_of("clip_cov")(inputs, **settings)
    is_in = [c > 0.7 for c in covariances]
    is_in[1] = False  # its ratio e is beyond the clip already
    assert output.metrics["picked_fraction"].tolist() == pytest.approx([float(x) for x in is_in])
    assert [x == 0 for x in output.loss.tolist()] == is_in
    ratios = [1.0, math.e, 1.0, math.exp(-0.1)]
    plain = [-a * r for a, r in zip(advantages, ratios, strict=True)]
    largest = sorted(range(4), key=lambda i: covariances[i])[-2:]
    gaps = [0.0, 1.0, 0.0, 0.1]
    expected = [x + 0.3 * gaps[i] * (i in largest) for i, x in enumerate(plain)]
    penalised = loss_of("kl_cov")(inputs, cov_fraction=0.5, kl_coefficient=0.3)
    assert penalised.loss.tolist() == pytest.approx(expected, rel=1e-5)


def test_opo_gpg_and_pass_at_k_by_hand():
    inputs = AdvantageInputs.from_turns(
        [[1.0], [0.0], [0.0], [0.5], [0.5]], [[1], [2], [1], [3], [1]], [0, 0, 0, 1, 1]
    )
    tokens_of = [0, 1, 1, 2, 3, 3, 3, 4]
    per_trajectory = {
        "opo": [0.75, -0.25, -0.25, 0, 0],
        "gpg": [5 / 3 * 2 / 3, -5 / 9, -5 / 9, 0, 0],
        "pass_at_k": [1 / (math.sqrt(1 / 3) + 1e-6), 0, 0, 0, 0],
    }
    for name, expected in per_trajectory.items():
        advantages_T = estimate(estimator_of(name), inputs).advantages_T
        assert advantages_T.tolist() == pytest.approx([expected[i] for i in tokens_of]), name
    with pytest.raises(ConfigError, match="only one member"):
        estimate(estimator_of("opo"), AdvantageInputs.from_turns([[1.0]], [[1]], [0]))


def test_gdpo_by_hand_lets_no_part_drown_another():
    # "big" is worth 100 and "small" 1: each counts the same after its own normalisation.
    parts = {"big": [100.0, 0.0, 100.0, 0.0], "small": [0.0, 1.0, 1.0, 0.0]}
    inputs = AdvantageInputs.from_turns(
        [[a + b] for a, b in zip(*parts.values(), strict=True)],
        [[1], [1], [1], [1]],
        [0, 0, 0, 0],
        reward_parts_G={name: torch.tensor(values) for name, values in parts.items()},
    )
    advantages = estimate(estimator_of("gdpo"), inputs).advantages_T.tolist()
    assert advantages == pytest.approx([0, 0, math.sqrt(1.5), -math.sqrt(1.5)], abs=1e-4)
    one = estimate(estimator_of("gdpo"), inputs, weights={"small": 3.0}).advantages_T.tolist()
    assert one == pytest.approx([-math.sqrt(0.75), *[math.sqrt(0.75)] * 2, -math.sqrt(0.75)], 1e-4)
    with pytest.raises(ConfigError, match="no part 'smal'") as caught:
        estimate(estimator_of("gdpo"), inputs, weights={"smal": 1.0})
    assert "did you mean 'small'" in caught.value.hints[0]
    with pytest.raises(ConfigError, match="leave no part of the reward to learn from"):
        estimate(estimator_of("gdpo"), inputs, weights={"small": 0.0, "large": 0.0})
    without = AdvantageInputs.from_turns([[1.0], [0.0]], [[1], [1]], [0, 0])
    advantages = estimate(estimator_of("gdpo"), without).advantages_T.tolist()
    assert advantages == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def test_gigpo_by_hand_compares_turns_from_the_same_state():
    # Two episodes from the door: one goes through, the other is sent back to it and then goes.
    rewards, keys = [[0, 1], [0, 0, 1], [0]], [["door", "hall"], ["door", "cell", "door"], [None]]
    lengths = [[2, 1], [1, 1, 1], [1]]
    inputs = AdvantageInputs.from_turns(rewards, lengths, [0, 0, 0], state_keys=keys)
    advantages = estimate(estimator_of("gigpo"), inputs, discount=0.5).advantages_T.tolist()
    # At the door the returns are 1/2, 1/4 and 1; their mean is 7/12.
    door = [1 / 2 - 7 / 12, 1 / 4 - 7 / 12, 1 - 7 / 12]
    episode = [1 / 3, 1 / 3, -2 / 3]
    assert advantages == pytest.approx(
        [
            *[episode[0] + door[0]] * 2,
            episode[0],
            episode[1] + door[1],
            episode[1],
            episode[1] + door[2],
            episode[2],
        ]
    )
    plain = AdvantageInputs.from_turns(rewards, lengths, [0, 0, 0])
    advantages = estimate(estimator_of("gigpo"), plain).advantages_T.tolist()
    assert advantages == pytest.approx([episode[i] for i in (0, 0, 0, 1, 1, 1, 2)])
    other = AdvantageInputs.from_turns(rewards, lengths, [0, 0, 1], state_keys=keys)
    with pytest.raises(ConfigError, match="only one member"):
        estimate(estimator_of("gigpo"), other)


@pytest.mark.parametrize(("mode", "is_normalised"), [("mean", False), ("mean_std", True)])
def test_gigpo_gives_the_numbers_of_its_authors(mode, is_normalised):
    # `gigpo/core_gigpo.py` of verl-agent (April 2026), its mean over trajectories as in the paper.
    numbers = json.loads((Path(__file__).parent / "gigpo_numbers.json").read_text())
    lengths = [[1] * len(turns) for turns in numbers["rewards"]]
    inputs = AdvantageInputs.from_turns(
        numbers["rewards"], lengths, numbers["group_ids"], state_keys=numbers["state_keys"]
    )
    settings = {"discount": numbers["discount"], "is_normalised": is_normalised}
    advantages = estimate(estimator_of("gigpo"), inputs, **settings).advantages_T.tolist()
    assert advantages == pytest.approx(numbers[mode], abs=1e-5)


def test_equal_keys_of_other_groups_are_other_states():
    keys = [["a"], ["a"], ["a"], ["a"]]
    inputs = AdvantageInputs.from_turns(
        [[1], [0], [1], [1]], [[1]] * 4, [0, 0, 1, 1], state_keys=keys
    )
    assert inputs.state_ids_T.tolist() == [0, 0, 1, 1]
    assert estimate(estimator_of("gigpo"), inputs).advantages_T.tolist() == [1.0, -1.0, 0.0, 0.0]


def with_role(group: Group, role: str) -> Group:
    task = Task(id=group.task.id, data={"role": role})
    members = tuple(replace(t, task=task) for t in group.trajectories)
    return replace(group, task=task, trajectories=members)


def role_trainer(decoder: Decoder | None = None) -> Trainer:
    config = TrainerConfig(algorithm="rae", lr=1e-3)
    return Trainer(
        decoder or tiny_decoder(),
        config,
        advantage=estimator_of("rae"),
        loss=loss_of(config.loss),
    )


def test_rae_keeps_a_running_mean_of_each_role(tmp_path):
    groups = honest_logprobs(tiny_decoder(), batch(seed=5, num_groups=2))
    groups = [
        with_role(group, role) for group, role in zip(groups, ("first", "second"), strict=True)
    ]
    trainer = role_trainer()
    trainer.step(groups, version=0)
    expected = []
    for group in groups:
        n = len(group)
        mean = (1 - 0.95**n) * sum(group.rewards_G) / n
        expected += [reward - mean for reward in group.rewards_G]
    means = {row["trajectory"]: row["advantage"] for row in trainer.trained_tokens()}
    assert [means[i] for i in range(len(expected))] == pytest.approx(expected, abs=1e-5)
    # A restored trainer goes on from the same means, whichever role comes first.
    path = save_trainer(trainer, tmp_path, 1, tmp_path)
    other = role_trainer(load_checkpoint(path))
    restore_trainer(other, path)
    for trained in (trainer, other):
        trained.step(groups[::-1], version=0)
    assert [row["advantage"] for row in other.trained_tokens()] == [
        row["advantage"] for row in trainer.trained_tokens()
    ]


def test_length_penalty_is_for_right_answers_only():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.5, 1.0])
    lengths, groups = torch.tensor([10, 20, 3, 90, 40]), torch.tensor([0, 0, 0, 0, 1])
    shaped = length_penalised(rewards, lengths, groups, share=0.4)
    z = 1  # the deviation over n of 10 and 20 is 5
    short, long = (1 - 0.4 / (1 + math.exp(x)) for x in (z, -z))
    assert shaped.tolist() == pytest.approx([short, long, 0.0, 0.5, 0.8])
    lenient = length_penalised(rewards, lengths, groups, share=0.4, right_reward=0.5)
    assert lenient[3] < 0.5
    assert lenient[2] == 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dppo_tv", {"truncation": 0.0}),
        ("dro", {"beta": 0.0}),
        ("clip_cov", {"cov_fraction": 0.0}),
        ("clip_cov", {"cov_low": 5.0}),
        ("kl_cov", {"cov_fraction": 1.5}),
    ],
)
def test_settings_that_do_nothing_are_refused(name, settings):
    with pytest.raises(ConfigError, match="must be"):
        loss_of(name)(verl_batch(), **settings)


# ---- contracts and the batch pass ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dppo_tv", {}),
        ("dppo_tv", {"clip_low": None, "clip_high": None}),
        ("dppo_kl", {}),
        ("gmpo", {}),
        ("gmpo", {"clip_low": None, "clip_high": None}),
        ("dro", {}),
        ("gpg", {}),
        ("clip_cov", {}),
        ("clip_cov", {"cov_fraction": 0.3, "cov_low": 0.1}),
        ("kl_cov", {}),
        ("kl_cov", {"cov_fraction": 0.5, "kl_coefficient": 2.0}),
    ],
)
def test_losses_keep_the_contract(name, settings):
    check_policy_loss(loss_of(name), **settings)


@pytest.mark.parametrize(
    ("name", "compares", "settings"),
    [
        ("opo", "siblings", {}),
        ("gpg", "nothing", {}),
        ("pass_at_k", "siblings", {}),
        ("pass_at_k", "siblings", {"is_normalised": False}),
        ("gdpo", "batch", {}),
        ("gdpo", "batch", {"weights": {"all": 2.0}}),
        ("rae", "nothing", {}),
        ("gigpo", "nothing", {}),
        ("gigpo", "siblings", {"discount": 1.0}),
        ("gigpo", "siblings", {"is_normalised": True, "discount": 1.0, "step_weight": 0.5}),
    ],
)
def test_estimators_keep_the_contract(name, compares, settings):
    check_advantage_estimator(estimator_of(name), compares=compares, **settings)


def test_contract_refuses_a_batch_pass_that_depends_on_order():
    def first(batch: LossInputs) -> torch.Tensor:
        return torch.arange(len(batch.advantages)) == 0

    @with_batch_pass(first)
    def loss(batch: LossInputs) -> LossOutput:
        picked_T = first(batch) if batch.picked is None else batch.picked
        ratio_T = (batch.logprobs - batch.proximal).clamp(-20, 20).exp()
        return LossOutput(loss=(-batch.advantages * ratio_T).masked_fill(picked_T, 0.0))

    with pytest.raises(AssertionError, match="sequences' order"):
        check_policy_loss(loss)


def steps(groups, **settings) -> tuple[torch.Tensor, dict[str, float]]:
    """The weights after two steps, and the last metrics."""
    config = TrainerConfig(
        algorithm="clip_cov",
        lr=1e-3,
        loss_kwargs={"cov_fraction": 0.05, "cov_low": 0.0},
        **{"clip_low": 0.2, "clip_high": 0.2},
        **settings,
    )
    trainer = Trainer(
        tiny_decoder(),
        config,
        advantage=estimator_of(config.advantage),
        loss=loss_of(config.loss),
        max_new_tokens=9,
    )
    trainer.step(groups, version=0)
    metrics = trainer.step(groups, version=0)
    return torch.cat([tensor.flatten() for _, tensor in trainer.weights()]).clone(), metrics


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("proximal", ["auto", "recomputed"])
def test_picks_are_those_of_the_whole_update_however_it_is_cut(minibatches, proximal):
    groups = honest_logprobs(tiny_decoder(), batch(seed=5, num_groups=4))
    settings = {"minibatches": minibatches, "correction": {"proximal": proximal}}
    whole, metrics = steps(groups, **settings)
    parts, cut_metrics = steps(groups, tokens_per_microbatch=64, **settings)
    assert cut_metrics["train/micro_batches"] > metrics["train/micro_batches"]
    assert metrics["train/picked_fraction"] == cut_metrics["train/picked_fraction"] > 0
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)
