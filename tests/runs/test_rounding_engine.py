"""An engine that computes in bfloat16: its rounding is no step of the policy and is not clipped."""

from __future__ import annotations

import pytest
import torch

from areal_gym.config import load_config
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.replay import replay
from areal_gym.runs.train import train
from tests._support.display_lines import Lines

SMALL = [
    "env.id=shaped",
    "rollout.group_size=4",
    "rollout.batch_groups=2",
    "rollout.max_in_flight=8",
    "rollout.max_new_tokens=12",
    "engine.num_slots=8",
    "engine.max_context=256",
    "eval.num_tasks=2",
    "steps=1",
]


@pytest.fixture(scope="module")
def sharp_policy(tiny_policy, tmp_path_factory):
    """A policy that prefers some tokens: its rounding shows."""
    decoder = load_checkpoint(tiny_policy)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3.0)
    return save_checkpoint(decoder, tmp_path_factory.mktemp("sharp"), tokenizer_dir=tiny_policy)


def first_step(policy, run_dir, *overrides):
    """The metrics of a run's only step, and what the run has said of recomputing."""
    torch.set_num_threads(1)
    display = Lines()
    config = load_config(overrides=[f"engine.model={policy}", *SMALL, *overrides])
    train(config, run_dir=run_dir, display=display)
    remarks = [line for line in display.lines if "trainer computes" in line]
    return RunDir(run_dir).read_metrics()[0], remarks


@pytest.mark.parametrize("overrides", [[], ["trainer.runs_in=process"]], ids=["thread", "process"])
def test_gspo_with_a_bfloat16_engine_clips_nothing_on_policy(
    overrides, shaped_env, sharp_policy, tmp_path
):
    # A learning rate of nothing: both updates of the step are on policy.
    gspo = ["trainer.algorithm=gspo", "trainer.minibatches=2", "trainer.lr=1e-12", *overrides]
    rounded, remarks = first_step(sharp_policy, tmp_path / "run", *gspo, "engine.dtype=bfloat16")
    assert rounded["train/engine_gap"] > 6e-5
    assert rounded["train/clip_fraction"] == 0
    assert rounded["train/ratio"] == pytest.approx(1, abs=1e-5)
    assert "train/stale_weight" in rounded
    assert len(remarks) == 1
    assert "'gspo' (0.0003)" in remarks[0]
    assert RunDir(tmp_path / "run").read_provenance()["engine_gap"]["max"] > 6e-5


def test_gspo_with_a_bfloat16_trainer_clips_nothing_on_policy(shaped_env, sharp_policy, tmp_path):
    """The pass before the updates sees other micro-batches, and bfloat16 other digits there."""
    gspo = ["trainer.algorithm=gspo", "trainer.lr=1e-12", "trainer.dtype=bfloat16"]
    split = ["trainer.tokens_per_microbatch=100", "engine.max_logprob_gap=1"]
    metrics, _ = first_step(sharp_policy, tmp_path / "run", *gspo, *split, "engine.dtype=bfloat16")
    assert metrics["train/clip_fraction"] == 0
    assert metrics["train/ratio"] == 1


def test_logprobs_of_an_exact_engine_are_used(shaped_env, sharp_policy, tmp_path):
    metrics, remarks = first_step(sharp_policy, tmp_path / "run", "trainer.algorithm=gspo")
    assert metrics["train/engine_gap"] < 6e-5
    assert "train/stale_weight" not in metrics
    assert remarks == []


def test_logprobs_of_a_bfloat16_engine_are_used_with_a_wide_clip(shaped_env, tiny_policy, tmp_path):
    metrics, remarks = first_step(tiny_policy, tmp_path / "run", "engine.dtype=bfloat16")
    assert metrics["train/clip_fraction"] == 0
    assert "train/stale_weight" not in metrics
    assert remarks == []


def test_engine_logprobs_can_be_forced(shaped_env, sharp_policy, tmp_path):
    wanted = ["trainer.algorithm=gspo", "trainer.correction.proximal=recorded"]
    metrics, remarks = first_step(
        sharp_policy, tmp_path / "run", *wanted, "engine.dtype=bfloat16", "trainer.lr=1e-12"
    )
    assert metrics["train/clip_fraction"] > 0.1
    assert remarks == []


def test_bfloat16_engine_run_is_replayed_bit_for_bit(shaped_env, sharp_policy, tmp_path):
    first_step(sharp_policy, tmp_path / "run", "trainer.algorithm=gspo", "engine.dtype=bfloat16")
    report = replay(load_config(tmp_path / "run" / "config.yaml"), tmp_path / "run")
    assert report.is_identical
    assert report.max_difference == 0.0
