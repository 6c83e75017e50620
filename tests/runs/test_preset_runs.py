"""Whole runs of presets with parts of their own: asynchronous, resumed, and trained again."""

from __future__ import annotations

import pytest

from areal_gym.config import load_config
from areal_gym.errors import ConfigError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.replay import replay
from areal_gym.runs.train import train

SMALL = [
    "env.id=shaped",
    "rollout.group_size=4",
    "rollout.batch_groups=2",
    "rollout.max_in_flight=8",
    "rollout.max_new_tokens=12",
    "engine.num_slots=8",
    "engine.max_context=256",
    "eval.num_tasks=2",
    "trainer.minibatches=2",
    "trainer.optimizer=muon",
]


def config_of(policy, *overrides):
    return load_config(overrides=[f"engine.model={policy}", *SMALL, *overrides])


def weights(run_dir, step):
    return load_checkpoint(run_dir / "checkpoints" / f"step-{step:06d}").state_dict()


@pytest.mark.parametrize(
    "name",
    [
        "dapo",
        "ppo",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("m2po", "reinforce_pp")),
    ],
)
def test_asynchronous_preset_run_is_replayed_exactly(name, shaped_env, tiny_policy, tmp_path):
    """Through the worker process, and its record through a learner in this one: bit for bit."""
    overrides = [f"trainer.algorithm={name}", "rollout.max_staleness=2", "steps=3"]
    train(config_of(tiny_policy, *overrides), run_dir=tmp_path / "run")
    report = replay(load_config(tmp_path / "run" / "config.yaml"), tmp_path / "run")
    assert report.is_identical
    assert report.max_difference == 0.0
    for row in RunDir(tmp_path / "run").read_metrics():
        assert ("train/stale_weight" in row) == (row["rollout/staleness_max"] > 0)


@pytest.mark.parametrize("name", ["ppo", pytest.param("reinforce_pp", marks=pytest.mark.long)])
def test_resumed_preset_run_equals_the_uninterrupted_one(name, shaped_env, tiny_policy, tmp_path):
    """Critic and reference policy are those of before."""

    def play(out, steps, mode="new"):
        config = config_of(tiny_policy, f"trainer.algorithm={name}", f"steps={steps}")
        train(config, run_dir=tmp_path / out, mode=mode)

    play("whole", 3)
    play("cut", 1)
    play("cut", 3, mode="resume")
    whole, cut = weights(tmp_path / "whole", 3), weights(tmp_path / "cut", 3)
    start = load_checkpoint(tiny_policy).state_dict()
    # Not bit for bit: the last digit of recorded log-probabilities depends on time.
    apart = sum(float((whole[key] - cut[key]).norm() ** 2) for key in whole) ** 0.5
    moved = sum(float((whole[key] - start[key]).norm() ** 2) for key in whole) ** 0.5
    assert apart <= 0.05 * moved
    key = "train/kl_reference" if name == "reinforce_pp" else "train/critic_loss"
    rows = [RunDir(tmp_path / out).read_metrics()[-1] for out in ("whole", "cut")]
    assert rows[0][key] > 0
    assert rows[1][key] == pytest.approx(rows[0][key], rel=0.05)


def test_replay_with_another_algorithm(shaped_env, tiny_policy, tmp_path):
    train(config_of(tiny_policy, "steps=2"), run_dir=tmp_path / "run")
    recorded = tmp_path / "run" / "config.yaml"
    found = {}
    for name in ("gspo", "ppo"):
        config = load_config(recorded, [f"trainer.algorithm={name}"])
        replay(config, tmp_path / "run", out=tmp_path / name)
        found[name] = weights(tmp_path / name, 2)
    assert load_config(recorded, ["trainer.algorithm=gspo"]).trainer.loss == "gspo"
    grpo = weights(tmp_path / "run", 2)
    assert not any(all((w[key] == grpo[key]).all() for key in w) for w in found.values())


def test_invalid_loss_settings_are_refused_before_rollouts(shaped_env, tiny_policy, tmp_path):
    config = config_of(tiny_policy, "trainer.loss_kwargs.dual_clip=0.5", "steps=1")
    with pytest.raises(ConfigError, match="must be above 1"):
        train(config, run_dir=tmp_path / "run")
    assert not RunDir(tmp_path / "run").read_metrics()
