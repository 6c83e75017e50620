"""What the learner makes of an algorithm's parts: KL, entropy, shaping, corrections, the critic."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from areal_gym.config import TrainerConfig
from areal_gym.config.algorithm_settings import PRESETS
from areal_gym.errors import ConfigError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.plugins import registry
from areal_gym.trainer.algorithms.advantages import estimate, grpo
from areal_gym.trainer.algorithms.losses import LossOutput, ppo_clip
from areal_gym.trainer.algorithms.ratios import KL_ESTIMATORS
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.experience import advantage_inputs
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.trainer.checkpoint import restore_trainer, save_trainer
from areal_gym.trainer.critic import Critic
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Group, StopReason
from tests._support.tiny_training import batch, honest_logprobs, tiny_decoder, trajectory

NAMES = sorted(PRESETS)


@pytest.fixture(scope="module")
def initial(tmp_path_factory):
    """The tiny decoder as a checkpoint: what reference policies are loaded from."""
    home = tmp_path_factory.mktemp("initial")
    return save_checkpoint(tiny_decoder(), home / "policy", tokenizer_dir=home)


def learner(initial, decoder=None, **config) -> Trainer:
    settings = TrainerConfig(**config)
    return Trainer(
        decoder or tiny_decoder(),
        settings,
        advantage=registry().load("advantages", settings.advantage),
        loss=registry().load("losses", settings.loss),
        max_new_tokens=9,
        reference=initial,
    )


def flat(trained: Trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in trained.weights()]).clone()


def gradient(trained: Trainer, groups: list[Group], version: int = 0) -> torch.Tensor:
    """What a step's clipped gradient was: after one step, Adam's mean is 0.1 times it."""
    trained.step(groups, version)
    means = [tensor for name, tensor in trained.states().items() if name.endswith(".exp_avg")]
    return 10 * torch.cat([mean.flatten() for mean in means])


def mean_logprob(trained: Trainer, groups: list[Group], reward: float) -> float:
    rows = [row for row in sequences_of(groups) if row.reward == reward]
    return float(torch.cat(trained.score(rows)).mean())


# ---- every preset ----------------------------------------------------------------------------


def with_answer_probs(groups: list[Group]) -> list[Group]:
    """Give each turn the same probability of the known answer, which igpo needs."""

    def changed(trajectory):
        turns = (dataclasses.replace(turn, answer_prob=0.5) for turn in trajectory.turns)
        return dataclasses.replace(trajectory, turns=tuple(turns))

    return [
        dataclasses.replace(group, trajectories=tuple(map(changed, group.trajectories)))
        for group in groups
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_raises_rewarded_tokens(initial, name):
    groups = with_answer_probs(honest_logprobs(tiny_decoder(), batch(seed=5, num_groups=4)))
    trained = learner(initial, algorithm=name, lr=3e-3)
    gap = mean_logprob(trained, groups, 1) - mean_logprob(trained, groups, 0)
    for _ in range(4):
        metrics = trained.step(groups, version=0)
        assert metrics["train/skipped_updates"] == 0
        assert all(math.isfinite(value) for value in metrics.values())
    assert mean_logprob(trained, groups, 1) - mean_logprob(trained, groups, 0) > gap + 0.05


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", [0, 2])
def test_gradient_is_independent_of_micro_batches_and_group_order(initial, name, version):
    groups = with_answer_probs(batch(num_groups=4))
    whole, parts = (
        gradient(learner(initial, algorithm=name, tokens_per_microbatch=budget), order, version)
        for budget, order in ((100_000, groups), (64, groups[::-1]))
    )
    assert float(whole.norm()) > 0.01
    assert float((whole - parts).norm() / whole.norm()) < 2e-5


# ---- KL and entropy --------------------------------------------------------------------------


def test_kl_without_reference_is_refused():
    settings = TrainerConfig(kl={"coefficient": 0.1})
    with pytest.raises(ConfigError, match="needs a reference policy"):
        Trainer(tiny_decoder(), settings, advantage=grpo, loss=ppo_clip)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_pulls_towards_the_reference(initial, estimator):
    kl = {"coefficient": 100.0, "estimator": estimator}
    far = load_checkpoint(initial)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in far.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    groups = honest_logprobs(far, batch(num_groups=4))
    trained = learner(initial, far, kl=kl, lr=1e-3)
    found = [trained.step(groups, 0)["train/kl_reference"] for _ in range(6)]
    assert found[-1] < found[0] / 2
    # At the reference there is nothing to pull.
    at_home = learner(initial, kl=kl).step(batch(num_groups=4), 0)
    assert at_home["train/kl_reference"] == pytest.approx(0.0, abs=1e-6)
    here, there = (gradient(learner(initial, kl=k), batch()) for k in (kl, {}))
    torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_kl_reward_lowers_advantages(initial, estimator):
    """Each token pays for itself and for all that follows it."""
    far = load_checkpoint(initial)
    with torch.no_grad():
        far.lm_head_weight.mul_(1.5)
    groups = honest_logprobs(far, batch(num_groups=2))
    kl = {"coefficient": 0.1, "estimator": estimator, "place": "reward"}
    trained = learner(initial, far, kl=kl)
    rows = sequences_of(groups)
    columns = trained._columns(rows, "recorded")
    trained._compute_advantages(rows, rows, columns)
    plain = estimate(grpo, advantage_inputs(rows, trained.config, 9)).advantages_T
    kl_T = KL_ESTIMATORS[estimator](columns.all("old"), columns.all("reference"))
    assert float(kl_T.abs().max()) > 0.1
    ids = [row.trajectory_id for row in rows for _ in range(row.num_trainable)]
    for t, advantage in enumerate(columns.all("advantages").tolist()):
        later = sum(float(kl_T[s]) for s in range(t, len(ids)) if ids[s] == ids[t])
        assert advantage == pytest.approx(float(plain[t]) - 0.1 * later, abs=1e-4)


def test_entropy_bonus_raises_entropy(initial):
    groups = honest_logprobs(tiny_decoder(), batch(num_groups=4))
    entropies = []
    for bonus in (0.0, 0.5):
        trained = learner(initial, entropy_bonus=bonus, lr=3e-3)
        entropies.append([trained.step(groups, 0)["train/entropy"] for _ in range(5)])
    assert entropies[0][0] == entropies[1][0]
    assert entropies[1][-1] > entropies[0][-1] + 0.1


# ---- rewards ---------------------------------------------------------------------------------


def with_rewards(played, *rewards: float):
    turns = zip(played.turns, rewards, strict=True)
    return dataclasses.replace(
        played, turns=tuple(dataclasses.replace(turn, reward=r) for turn, r in turns)
    )


def test_rewards_are_shaped_before_group_comparison(initial):
    rng = random.Random(0)
    played = [trajectory(rng, (1, 2), num_turns=2) for _ in range(2)]
    members = (with_rewards(played[0], 3.0, 1.0), played[1])
    groups = [Group(id="g", task=played[0].task, trajectories=members)]

    def shaped(**reward) -> tuple[list[float], list[float]]:
        config = TrainerConfig(reward=reward)
        inputs = advantage_inputs(sequences_of(groups), config, 9)
        return inputs.rewards_G.tolist(), [r for r in inputs.rewards_T.tolist() if r]

    assert shaped() == ([4.0, 0.0], [3.0, 1.0])
    assert shaped(bias=-1.0, scale=2.0) == ([6.0, -2.0], [6.0, -2.0])
    assert shaped(clip=2.5) == ([2.5, 0.0], [3.0, -0.5])
    metrics = learner(initial, reward={"bias": 1.0}).step(groups, 0)
    assert (metrics["reward/mean"], metrics["reward/shaped_mean"]) == (2.0, 3.0)


def test_overlong_penalty_applies_to_the_longest_turn():
    groups = batch(seed=3, num_groups=2)
    rows = sequences_of(groups)
    found = advantage_inputs(rows, TrainerConfig(reward={"overlong_tail": 0.5}), 8).rewards_G
    for row, reward in zip(rows, found.tolist(), strict=True):
        turns = [t for t, is_trained in zip(row.turn_ids, row.loss_mask, strict=True) if is_trained]
        longest = max(turns.count(t) for t in set(turns))
        assert reward == pytest.approx(row.reward - min(1, max(0, (longest - 4) / 4)))
    assert found.tolist() != [row.reward for row in rows]


def test_turn_rewards_reach_their_own_tokens(initial):
    """Per turn, the first turn's tokens hear of what the second one earned, not vice versa."""
    rng = random.Random(0)
    played = [trajectory(rng, (1, 2), num_turns=2) for _ in range(3)]
    earned = ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0))
    members = tuple(with_rewards(t, *r) for t, r in zip(played, earned, strict=True))
    rows = sequences_of([Group(id="g", task=members[0].task, trajectories=members)])
    trained = learner(
        initial, advantage="per_turn", advantage_kwargs={"baseline": "reinforce", "discount": 0.5}
    )
    columns = trained._columns(rows, "recorded")
    trained._compute_advantages(rows, rows, columns)
    returns = ((1.0, 0.0), (0.5, 1.0), (0.0, 0.0))
    for i, row in enumerate(rows):
        turns = [t for t, is_trained in zip(row.turn_ids, row.loss_mask, strict=True) if is_trained]
        assert columns.take("advantages", [i]).tolist() == [returns[i][t] for t in turns]


# ---- corrections -----------------------------------------------------------------------------

CORRECTIONS = [
    {},
    {"action": "mask"},
    {"action": "mask", "lower": 0.5},
    {"level": "sequence"},
    {"level": "sequence", "action": "mask", "statistic": "max"},
    {"action": "mask", "measure": "binary_kl", "upper": 0.1},
    {"second_moment": 0.5},
    {"proximal": "loglinear"},
    {"proximal": "linear"},
    {"proximal": "recomputed"},
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("minibatches", [1, 3])
def test_every_correction_trains_on_stale_batches(initial, correction, minibatches):
    trained = learner(initial, correction=correction, minibatches=minibatches)
    before = flat(trained)
    metrics = trained.step(batch(num_groups=3, version=1), version=3)
    assert not torch.equal(flat(trained), before)
    assert metrics["train/stale_weight"] >= 0
    assert 0 <= metrics["train/corrected_fraction"] <= 1
    assert ("train/kept_fraction" in metrics) == ("second_moment" in correction)


def test_on_policy_batches_are_corrected_only_on_request(initial):
    assert "train/stale_weight" not in learner(initial).step(batch(), version=0)
    metrics = learner(initial, correction={"proximal": "recomputed"}).step(batch(), version=0)
    assert "train/stale_weight" in metrics


def test_coupled_objective_uses_ratios_to_the_sampling_policy(initial):
    stale = batch(num_groups=3)
    trained = learner(initial, correction={"proximal": "recorded"}, clip_low=None, clip_high=None)
    metrics = trained.step(stale, version=2)
    assert "train/stale_weight" not in metrics
    assert metrics["train/ratio"] != pytest.approx(1.0, abs=0.01)
    decoupled = learner(initial, clip_low=None, clip_high=None).step(stale, version=2)
    assert decoupled["train/ratio"] == pytest.approx(1.0, abs=1e-6)
    # Without clips and caps they are the same objective.
    coupled, open_ended = (
        gradient(learner(initial, clip_low=None, clip_high=None, correction=c), stale, 2)
        for c in ({"proximal": "recorded"}, {"upper": None})
    )
    torch.testing.assert_close(coupled, open_ended, atol=1e-5, rtol=1e-4)


def test_masked_tokens_have_no_gradient(initial):
    nothing = learner(initial, correction={"action": "mask", "upper": 1e-9})
    before = flat(nothing)
    assert nothing.step(batch(), version=1)["train/corrected_fraction"] == 1.0
    assert torch.equal(flat(nothing), before)


def test_interpolated_proximal_policy_approximates_recomputation(initial):
    """Over several updates the guess is near what was recomputed."""
    groups = honest_logprobs(tiny_decoder(), batch(num_groups=3))
    start, moved = flat(learner(initial)), {}
    for proximal in ("auto", "loglinear", "linear"):
        trained = learner(initial, correction={"proximal": proximal}, minibatches=3, lr=1e-4)
        trained.step(groups, version=1)
        moved[proximal] = flat(trained) - start
    for proximal in ("loglinear", "linear"):
        assert torch.cosine_similarity(moved["auto"], moved[proximal], dim=0) > 0.99


# ---- the critic ------------------------------------------------------------------------------


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_critic_learns_returns(initial, trunk):
    groups = honest_logprobs(tiny_decoder(), batch(num_groups=4))
    trained = learner(initial, algorithm="ppo", critic={"trunk": trunk}, lr=2e-3)
    found = [trained.step(groups, 0) for _ in range(25)]
    assert found[0]["train/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found[-1]["train/explained_variance"] > 0.3
    assert found[-1]["train/critic_loss"] < found[0]["train/critic_loss"]
    assert found[-1]["train/critic_grad_norm"] > 0


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_critic_gradient_reaches_the_policy_only_with_a_shared_trunk(trunk):
    """With a policy loss of zero, a policy moves by the critic's gradient or not at all."""

    def silent(inputs):
        return LossOutput(loss=inputs.logprobs * 0)

    settings = TrainerConfig(algorithm="ppo", critic={"trunk": trunk})
    trained = Trainer(tiny_decoder(), settings, advantage=gae, loss=silent)
    trained.step(batch(), 0)  # the head is 0 at first: nothing passes it
    before = flat(trained)
    trained.step(batch(), 0)
    assert torch.equal(flat(trained), before) == (trunk == "own")


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_critic_is_saved_and_restored(initial, trunk, tmp_path):
    settings = {"algorithm": "ppo", "critic": {"trunk": trunk}, "optimizer": "muon"}
    whole = learner(initial, **settings)
    for seed in range(4):
        whole.step(batch(seed=seed), 0)
        if seed == 1:
            path = save_trainer(whole, tmp_path, 2, tmp_path)
    resumed = learner(initial, load_checkpoint(path), **settings)
    restore_trainer(resumed, path)
    for seed in (2, 3):
        metrics = resumed.step(batch(seed=seed), 0)
    assert torch.equal(flat(resumed), flat(whole))
    assert (
        whole.step(batch(seed=9), 0)["train/critic_loss"]
        == (resumed.step(batch(seed=9), 0)["train/critic_loss"])
    )
    assert metrics["train/critic_loss"] > 0


def test_checkpoint_without_critic_is_refused(initial, tmp_path):
    path = save_trainer(learner(initial), tmp_path, 1, tmp_path)
    with pytest.raises(ConfigError, match="has no critic"):
        restore_trainer(learner(initial, algorithm="ppo"), path)


def test_values_depend_only_on_each_rows_past(initial):
    decoder = tiny_decoder()
    critic = Critic(decoder, TrainerConfig())
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    rows = sequences_of(batch(num_groups=2))
    masks = [row.loss_mask for row in rows]
    packed = pack([Row(token_ids=r.token_ids, num_shared=r.num_prompt_tokens) for r in rows])
    with torch.no_grad():
        before_T, after_B = critic.before_and_after(decoder, packed, masks)
        alone = []
        for i, row in enumerate(rows):
            mine = pack([Row(token_ids=row.token_ids)])
            before, after = critic.before_and_after(decoder, mine, [row.loss_mask])
            alone.append(before)
            assert float(after[0]) == pytest.approx(float(after_B[i]), abs=1e-5)
            # After the row is before whatever comes next.
            longer = pack([Row(token_ids=(*row.token_ids, 0))])
            mask = (*([False] * len(row)), True)
            assert float(critic.before(decoder, longer, [mask])) == pytest.approx(
                float(after[0]), abs=1e-5
            )
    torch.testing.assert_close(torch.cat(alone), before_T, atol=1e-5, rtol=1e-5)


def test_only_truncated_rows_bootstrap_a_final_value(initial):
    groups = batch(num_groups=1)
    members = list(groups[0])
    members[1] = dataclasses.replace(members[1], stop_reason=StopReason.MAX_TOKENS)
    rows = sequences_of([dataclasses.replace(groups[0], trajectories=tuple(members))])
    trained = learner(initial, algorithm="ppo")
    torch.nn.init.ones_(trained._critic.head.weight)
    values_T, final_G = trained._passes.values(rows, trained._critic, len(members))
    assert len(values_T) == sum(row.num_trainable for row in rows)
    assert [bool(value) for value in final_G] == [False, True, False, False]
