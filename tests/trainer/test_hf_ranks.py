"""Several ranks train a model of transformers as one does: sharded, experts divided, adapters."""

import pytest

from areal_gym.config import TrainerConfig
from areal_gym.models.hf.hf_loading import build_policy
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.parallel.fsdp import load_for_training
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from tests._support.routed import routed_groups
from tests._support.tiny_architectures import tiny_config
from tests._support.tiny_training import batch, without_costs


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"algorithm": "ppo", "kl": {"coefficient": 0.1}},
            id="critic and reference",
            marks=pytest.mark.long,
        ),
        pytest.param({"algorithm": "ppo", "parallel": {"expert": 2}}, id="divided experts"),
        pytest.param(
            {"algorithm": "ppo", "routing_replay": True},
            id="replayed experts",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"algorithm": "ppo", "lora": {"rank": 4}}, id="adapter", marks=pytest.mark.long
        ),
    ],
)
def test_two_ranks_train_what_one_rank_trains(settings, tmp_path, capfd):
    policy = build_policy(tiny_config("qwen3_moe"), seed=0)
    policy.network.save_pretrained(tmp_path / "policy")
    groups, later = (batch(seed, num_groups=number) for seed, number in ((0, 4), (5, 3)))
    if "routing_replay" in settings:
        groups, later = (routed_groups(policy, each, shift=1) for each in (groups, later))
    config = TrainerConfig(lr=1e-3, num_ranks=2, critic={"trunk": "own"}, **settings)
    arguments = {"advantage": gae, "loss": ppo_clip, "reference": tmp_path / "policy"}
    theirs = ProcessTrainer(Trainer, tmp_path / "policy", config, **arguments)
    try:
        ours = Trainer(load_for_training(tmp_path / "policy", config), config, **arguments)
        start = weights_of(ours)
        metrics = without_costs(theirs.step(groups, 0))
        expected = without_costs(ours.step(groups, 0))
        assert metrics == pytest.approx(expected, rel=2e-4, abs=2e-5)
        ended, expected = weights_of(theirs), weights_of(ours)
        assert ended.keys() == expected.keys()
        moved = sum(float((expected[n] - start[n]).norm()) for n in start)
        apart = sum(float((ended[n] - expected[n]).norm()) for n in start)
        assert apart < 2e-2 * moved  # Adam makes a whole step of a gradient that is rounding
        theirs.save(tmp_path / "states").result()
        ours.load(tmp_path / "states")
        assert theirs.step(later, 1)["train/grad_norm"] > 0
    finally:
        theirs.close()
    assert "redistributing" not in capfd.readouterr().err  # torch's advice, from each rank
