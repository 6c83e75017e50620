import math
import random
from dataclasses import replace

import pytest
import torch
import transformers

from areal_gym.config import TrainerConfig, load_config
from areal_gym.errors import ConfigError
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.preparation import save_settings
from areal_gym.runs.resume import require_resumable
from areal_gym.trainer.algorithms.advantages import grpo, reinforce
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.lr_schedule import DriftDamping, lr_factor
from areal_gym.trainer.objectives.supervised import Sft, Supervised
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.teacher_divergence import VocabularyTeacher
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Group, Task
from tests._support.tiny_training import batch, honest_logprobs, tiny_decoder, trajectory


def settings_of(schedule, warmup=0, **settings):
    return TrainerConfig(lr_schedule=schedule, warmup_steps=warmup, **settings)


def factors(schedule, num_steps, warmup=0):
    config = settings_of(schedule, warmup)
    return [lr_factor(config, step) for step in range(num_steps)]


# ---- schedules ----------------------------------------------------------------------------------


def test_factors_by_hand():
    assert factors("constant", 4) == [1, 1, 1, 1]
    assert factors("constant", 4, warmup=3) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert factors({"id": "linear", "steps": 4}, 6) == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])
    half = {"id": "linear", "steps": 4, "min_ratio": 0.5}
    assert factors(half, 6) == pytest.approx([1, 0.875, 0.75, 0.625, 0.5, 0.5])
    cosine = [(1 + math.cos(math.pi * x)) / 2 for x in (0, 0.25, 0.5, 0.75, 1)]
    assert factors({"id": "cosine", "steps": 6}, 7, warmup=2) == pytest.approx([0.5, 1, *cosine])
    wsd = {"id": "wsd", "steps": 10, "decay_share": 0.4}
    falling = [1 - math.sqrt(x) for x in (0, 0.25, 0.5, 0.75, 1)]
    assert factors(wsd, 12) == pytest.approx([1] * 6 + falling + [0])
    linear = {**wsd, "decay": "linear", "min_ratio": 0.1}
    assert factors(linear, 12)[6:] == pytest.approx([1, 0.775, 0.55, 0.325, 0.1, 0.1])


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("min_ratio", [0.0, 0.25])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "wsd linear"])
def test_factors_are_those_of_transformers(schedule, min_ratio, warmup):
    num_steps, kind = 50, schedule.split()
    ours = {"id": kind[0], "steps": num_steps, "min_ratio": min_ratio}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if schedule == "linear":
        theirs = transformers.get_polynomial_decay_schedule_with_warmup(
            optimizer, warmup, num_steps, lr_end=min_ratio, power=1.0
        )
    elif schedule == "cosine":
        theirs = transformers.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, num_steps, min_lr_rate=min_ratio
        )
    else:
        ours |= {"decay_share": 0.2, "decay": kind[1] if kind[1:] else "sqrt"}
        theirs = transformers.get_wsd_schedule(
            *(optimizer, warmup, 10),
            num_training_steps=num_steps,
            min_lr_ratio=min_ratio,
            decay_type=kind[1] if kind[1:] else "1-sqrt",
        )
    (factor,) = theirs.lr_lambdas
    found = factors(ours, num_steps + 1, warmup)  # their cosine rises again after its end
    if not min_ratio:  # with it, some of theirs begin at the minimum
        # The first step of a warm-up moves here; there, its rate is 0.
        expected = [factor(step) for step in range(1, warmup + 1)]
        assert found[:warmup] == pytest.approx(expected, abs=1e-12)
    assert found[warmup:] == pytest.approx(
        [factor(step) for step in range(warmup, num_steps + 1)], abs=1e-12
    )


def test_run_gives_the_schedule_its_number_of_steps():
    config = load_config(overrides=["steps=40", "trainer.lr_schedule=cosine"])
    assert config.trainer.lr_schedule.steps is None
    assert config.trainer_of_run().lr_schedule.steps == 40
    fixed = load_config(overrides=["steps=40", "trainer.lr_schedule={id: wsd, steps: 30}"])
    assert fixed.trainer_of_run().lr_schedule.steps == 30
    with pytest.raises(ConfigError, match="needs the number of steps"):
        Supervised(tiny_decoder(), settings_of("cosine"), objective=Sft())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.lr_schedule=exponential"], "lr_schedule"),
        (["trainer.lr_schedule.min_ratio=2"], "min_ratio"),
        (["trainer.lr_schedule={id: wsd, decay_share: 0}"], "decay_share"),
        (["steps=5", "trainer.lr_schedule=linear", "trainer.warmup_steps=5"], "none of 5 steps"),
        (["trainer.lr_groups={'*': -1}"], "lr_groups"),
    ],
)
def test_impossible_schedules_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config(overrides=overrides)


def test_resuming_with_more_steps_says_what_becomes_of_the_rate(tmp_path):
    run = RunDir(tmp_path)
    schedule = "trainer.lr_schedule=cosine"
    save_settings(run, load_config(overrides=["steps=10", schedule]))
    assert require_resumable(run, load_config(overrides=["steps=10", schedule])) == []
    (warning,) = require_resumable(run, load_config(overrides=["steps=20", schedule]))
    assert "ends at step 20, not at step 10" in warning
    assert "trainer.lr_schedule.steps=10" in warning


# ---- stale batches ------------------------------------------------------------------------------


def test_rate_of_an_update_falls_where_the_policy_has_drifted():
    def factors(*cases, **settings):
        damping = DriftDamping(TrainerConfig(optimizer="muon", **settings))
        return [damping.factor(*case) for case in cases]

    assert factors((0.006, 9.0, 1), (0.012, 9.0, 1)) == [1, 0.5]
    assert factors((1.0, 4.0, 1), (0.0, 1.0, 1), (0.0, 0.0, 1)) == [0.2, 0.5, 1]
    # It is remembered: six steps later more than a half of 0.012 is left, and then less.
    later = factors((0.012, 9.0, 1), *[(0.0, 9.0, 1)] * 7)
    assert later == pytest.approx([0.5 / 0.9**steps for steps in range(7)] + [1])
    assert factors((math.nan, 3.0, 1), (math.inf, 3.0, 1), (0.0, 3.0, 1)) == [0.25, 0.25, 1]
    assert factors((1.0, 4.0, 1), (1.0, 4.0, 4), max_drift=None) == [1, 1]
    assert factors((0.04, 9.0, 1), max_drift=0.02) == [0.5]
    assert factors((0.0, -1.0, 1), (1.0, -1.0, 4)) == [1, 0.5]  # sampled by a policy to come


@pytest.mark.parametrize("limit", [0, -1, 2])
def test_limit_of_the_drift_is_a_share(limit):
    with pytest.raises(ConfigError, match=f"trainer.max_drift = {limit}.0: from above 0 to 1"):
        load_config(overrides=["env.id=tir", f"trainer.max_drift={limit}"])


def test_drift_is_remembered_by_steps_and_not_by_updates():
    damping = DriftDamping(TrainerConfig(optimizer="muon"))
    assert [damping.factor(drift, 9.0, 4) for drift in (0.006, 0.012)] == [1, 0.5]
    later = [damping.factor(0.0, 9.0, 4) for _ in range(8)]  # two steps of four updates
    assert later[3::4] == pytest.approx([0.5 / 0.9, 0.5 / 0.81])


@pytest.mark.parametrize(
    ("settings", "has_advantages"), [({}, True), ({"optimizer": "muon"}, False)]
)
def test_drift_of_adamw_and_of_students_is_the_kl_divergence(settings, has_advantages):
    damping = DriftDamping(TrainerConfig(**settings), has_advantages=has_advantages)
    assert damping.distance({"approx_kl": 0.08, "adverse_drift": 1, "advantage_size": 2}) == 0.08
    most = 1 if not has_advantages else 0.25  # 1 / sqrt(1 + 15)
    assert [damping.factor(drift, 15.0, 1) for drift in (0.01, 0.08)] == [most, 0.125]
    assert damping.factor(0.0, 15.0, 1) == pytest.approx(0.125 / 0.8)  # shorter than with updates
    later = [damping.factor(0.08 * 0.8, 15.0, 4), *(damping.factor(0.0, 15.0, 4) for _ in range(4))]
    assert later[-1] == pytest.approx(0.125 / 0.8 / 0.9)


def test_adamws_rate_is_at_most_the_root_of_that_share_for_stale_batches():
    damping = DriftDamping(TrainerConfig())
    assert [damping.factor(0.0, age, 1) for age in (0.0, 3.0, -3.0, 8.0)] == [1, 0.5, 0.5, 1 / 3]
    assert damping.factor(1.0, 3.0, 1) == 0.25
    assert damping.factor(1.0, 0.0, 1) == 1
    assert DriftDamping(TrainerConfig(max_drift=None)).factor(1.0, 3.0, 1) == 1


def first_step(version, minibatches=2, is_drifted=True, **settings):
    """The metrics of a step on tokens of version 0, and how far it moved the weights."""
    decoder = tiny_decoder()
    groups = batch() if is_drifted else honest_logprobs(decoder, batch())
    before = decoder.model.norm.weight.detach().clone()
    config = TrainerConfig(lr=1e-3, minibatches=minibatches, **settings)
    trainer = Trainer(decoder, config, advantage=grpo, loss=ppo_clip)
    metrics = trainer.step(groups, version=version)
    return metrics, float((decoder.model.norm.weight.detach() - before).abs().mean())


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_trainer_lowers_the_rate_of_updates_that_have_drifted(minibatches):
    fresh, moved = first_step(0, minibatches=minibatches)
    assert fresh["train/approx_kl"] > 0.1
    assert fresh["train/lr"] == 1e-3
    honest, _ = first_step(28, minibatches=minibatches, is_drifted=False)
    assert honest["train/lr"] == pytest.approx(1e-3 / math.sqrt(29))
    stale, moved_by_stale = first_step(3, minibatches=minibatches)
    assert stale["train/lr"] == pytest.approx(1e-3 / 4)
    assert moved_by_stale == pytest.approx(moved / 4, rel=0.2)
    undamped, moved_undamped = first_step(3, minibatches=minibatches, max_drift=None)
    assert undamped["train/lr"] == 1e-3
    assert moved_undamped == pytest.approx(moved, rel=0.2)


def with_log_ratios(groups, of_right, of_wrong):
    """The same groups, sampled by a policy from which right and wrong tokens have moved so far."""

    def moved(trajectory):
        by = of_right if trajectory.reward else of_wrong
        spans = [
            replace(span, logprobs=tuple(old - by for old in span.logprobs))
            if span.origin == "policy"
            else span
            for span in trajectory.spans
        ]
        return replace(trajectory, spans=tuple(spans))

    return [replace(group, trajectories=tuple(map(moved, group.trajectories))) for group in groups]


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_moves_that_the_advantages_ask_for_lower_the_rate_of_adamw_only(optimizer, minibatches):
    decoder = tiny_decoder()
    groups = honest_logprobs(decoder, batch())
    settings = {"optimizer": optimizer, "lr": 1e-6, "muon_lr": 1e-6, "minibatches": minibatches}

    def step(of_right, of_wrong, version=3):
        trainer = Trainer(decoder, TrainerConfig(**settings), advantage=grpo, loss=ppo_clip)
        return trainer.step(with_log_ratios(groups, of_right, of_wrong), version=version)

    full = step(-1.0, 1.0, version=0)["train/lr"]
    assert full == pytest.approx(1e-6)  # all rows teach
    learned = step(1.0, -1.0)
    assert learned["train/approx_kl"] > 0.3
    assert learned["train/drift"] == pytest.approx(0, abs=1e-5)
    assert learned["train/lr"] == pytest.approx(full / (4 if optimizer == "adamw" else 1))
    unlearned = step(-1.0, 1.0)
    assert (1 - math.exp(-1)) ** 2 < unlearned["train/drift"] < 1
    assert unlearned["train/lr"] == pytest.approx(full / 4)
    rounded = step(0.05, 0.05)  # of wrong tokens only, and by little
    assert 0 < rounded["train/drift"] < 0.05**2
    assert rounded["train/approx_kl"] < 0.05**2
    assert rounded["train/lr"] == pytest.approx(full / (2 if optimizer == "adamw" else 1))


def test_students_of_whole_distributions_are_slowed_down_by_the_distance(tmp_path):
    groups = honest_logprobs(tiny_decoder(), batch())
    teacher = VocabularyTeacher(
        directory=save_checkpoint(tiny_decoder(7), tmp_path / "teacher"), direction="reverse"
    )

    def rate(of_right, of_wrong):
        config = TrainerConfig(lr=1e-6, advantage="reinforce")
        trainer = Trainer(
            tiny_decoder(), config, advantage=reinforce, loss=ppo_clip, teacher=teacher
        )
        moved = with_log_ratios(groups, of_right, of_wrong)
        return trainer.step(moved, version=3)["train/lr"]

    assert rate(0.0, 0.0) == 1e-6
    assert rate(1.0, -1.0) == pytest.approx(1e-6 / 4)  # whatever the rewards say of the moves


# ---- rows without an advantage ------------------------------------------------------------------


def groups_of(*rewards):
    rng = random.Random(3)
    return [
        Group(
            id=str(i),
            task=Task(id="x", data={}),
            trajectories=tuple(trajectory(rng, (1, 2, i), reward=r) for r in rewards_G),
        )
        for i, rewards_G in enumerate(rewards)
    ]


MIXED, SOLVED = (0.0, 0.1), (0.1, 0.1)


def rate_of(*rewards, version=0, **settings):
    config = TrainerConfig(**{"lr": 1e-3, "optimizer": "muon"} | settings)
    decoder = tiny_decoder()
    trainer = Trainer(decoder, config, advantage=grpo, loss=ppo_clip)
    groups = honest_logprobs(decoder, groups_of(*rewards))  # no drift
    return trainer.step(groups, version=version)["train/lr"]


def test_muons_rate_is_the_root_of_the_share_of_rows_with_an_advantage():
    assert rate_of(MIXED, MIXED) == 1e-3
    assert rate_of(MIXED, SOLVED) == pytest.approx(1e-3 * math.sqrt(1 / 2))
    assert rate_of(SOLVED, MIXED, SOLVED, SOLVED) == pytest.approx(1e-3 / 2)
    # Each update has its own share: all rows of the first, none of the others.
    assert rate_of(MIXED, SOLVED, SOLVED, SOLVED, minibatches=4) == 1e-3
    assert rate_of(MIXED, SOLVED, optimizer="adamw") == 1e-3
    assert rate_of(MIXED, SOLVED, entropy_bonus=0.01) == 1e-3


def test_adamws_rate_is_the_same_root_for_stale_batches_only():
    def rate(*rewards, version=8, **settings):
        return rate_of(*rewards, version=version, optimizer="adamw", **settings)

    full = rate(MIXED, MIXED)
    assert full == pytest.approx(1e-3 / 3)  # by the age
    assert rate(MIXED, SOLVED) == pytest.approx(full * math.sqrt(1 / 2))
    full = rate(MIXED, MIXED, version=3)
    assert rate(MIXED, SOLVED, SOLVED, SOLVED, version=3) == pytest.approx(full / 2)
    assert rate(*[MIXED, *[SOLVED] * 24], version=3) == pytest.approx(full / 4)  # not a fifth
    assert rate(SOLVED, SOLVED, version=3) == pytest.approx(full / 4)  # its momentum goes on
    assert rate(MIXED, SOLVED, version=0) == 1e-3
    assert rate(MIXED, SOLVED, max_drift=None) == 1e-3
    assert rate(MIXED, SOLVED, entropy_bonus=0.01, version=3) == full


def test_muon_stands_still_without_a_gradient():
    """Else the momentum of earlier batches would make it a whole step."""
    config = TrainerConfig(optimizer="muon", minibatches=1)
    trainer = Trainer(tiny_decoder(), config, advantage=grpo, loss=ppo_clip)
    matrix = trainer.decoder.model.layers[0].mlp.up_proj.weight
    before = matrix.detach().clone()
    trainer.step(groups_of(MIXED, SOLVED), version=0)
    taught = matrix.detach().clone()
    assert not torch.equal(taught, before)
    metrics = trainer.step(groups_of(SOLVED, SOLVED), version=0)
    assert metrics["train/grad_norm"] == 0
    assert metrics["train/skipped_updates"] == 0
    assert torch.equal(matrix, taught)
    trainer.step(groups_of(SOLVED, MIXED), version=0)
    assert not torch.equal(matrix, taught)


# ---- groups -------------------------------------------------------------------------------------


def rates_of(decoder, config):
    optimizer = Optimizer(decoder, config)
    names = {id(p): name for name, p in decoder.named_parameters()}
    return {
        names[id(p)]: group["lr"]
        for part in optimizer.parts
        for group in part.param_groups
        for p in group["params"]
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_first_pattern_that_fits_sets_a_parameters_rate(optimizer):
    groups = {"*.q_proj.*": 1e-5, "*_proj.*": 2e-5, "*embed_tokens*": 0.0}
    config = TrainerConfig(optimizer=optimizer, lr=1e-3, muon_lr=1e-2, lr_groups=groups)
    decoder = tiny_decoder()
    rates = rates_of(decoder, config)
    assert rates.keys() == {name for name, _ in decoder.named_parameters()}
    assert rates["model.layers.0.self_attn.q_proj.weight"] == 1e-5
    assert rates["model.layers.1.mlp.up_proj.weight"] == 2e-5
    assert rates["model.embed_tokens.weight"] == 0
    assert rates["model.norm.weight"] == 1e-3


def test_groups_train_at_their_own_rates():
    decoder = tiny_decoder()
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    config = TrainerConfig(lr=1e-3, lr_groups={"*embed_tokens*": 0.0, "*.mlp.*": 1e-4})
    optimizer = Optimizer(decoder, config)
    for p in decoder.parameters():
        p.grad = torch.full_like(p, 1e-4)
    optimizer.step(0.5)
    after = dict(decoder.named_parameters())
    moved = {name: float((after[name].detach() - p).abs().max()) for name, p in before.items()}
    # AdamW's first update is the rate itself.
    assert moved["model.embed_tokens.weight"] == 0
    assert moved["model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.5e-4, rel=1e-2)
    assert moved["model.norm.weight"] == pytest.approx(0.5e-3, rel=1e-2)


def test_pattern_that_fits_nothing_shows_the_names():
    config = TrainerConfig(lr_groups={"embed_tokens": 1e-5})
    with pytest.raises(ConfigError, match="'embed_tokens', which fits no parameter") as refused:
        Optimizer(tiny_decoder(), config)
    assert any("model.embed_tokens.weight" in hint for hint in refused.value.hints)
