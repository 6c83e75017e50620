"""Ranks of which some see no picture train what one rank trains."""

import pytest

from areal_gym.config import TrainerConfig
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.parallel.fsdp import load_for_training
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from tests._support.picture_rows import groups_of, seeing_policy, two_groups, without_pictures
from tests._support.tiny_training import without_costs


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_vl", {"vision": "full"}),
        pytest.param("gemma3", {"vision": "full"}, marks=pytest.mark.long),
        pytest.param("qwen2_5_vl", {"vision": "projector"}, marks=pytest.mark.long),
        pytest.param("qwen3_vl", {"lora": {"rank": 4}}, marks=pytest.mark.long),
    ],
)
def test_blind_rank_keeps_pace(family, settings, tmp_path):
    config = TrainerConfig(lr=1e-3, num_ranks=2, tokens_per_microbatch=256, **settings)
    arguments = {"advantage": grpo, "loss": ppo_clip}
    with seeing_policy(family, tmp_path) as policy:
        rows = two_groups(policy)
        groups = groups_of([*rows[:3], *without_pictures(rows[3:])])
        theirs = ProcessTrainer(Trainer, tmp_path / "policy", config, **arguments)
        try:
            ours = Trainer(load_for_training(tmp_path / "policy", config), config, **arguments)
            start = weights_of(ours)
            for version in range(2):
                metrics = without_costs(theirs.step(groups, version))
                expected = without_costs(ours.step(groups, version))
                assert metrics["train/grad_norm"] == pytest.approx(
                    expected["train/grad_norm"], rel=1e-4
                )
                assert metrics["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
            ended, expected = weights_of(theirs), weights_of(ours)
        finally:
            theirs.close()
    moved = {name: float((expected[name] - start[name]).norm()) for name in start}
    apart = sum(float((ended[name] - expected[name]).norm()) for name in start)
    assert apart < 2e-2 * sum(moved.values())  # AdamW makes a whole step of what is rounding
    sees = [name for name in moved if "visual" in name or "vision_tower" in name]
    assert any(moved[name] > 0 for name in sees) == ("vision" in settings)
