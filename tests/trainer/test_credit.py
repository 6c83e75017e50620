"""Advantages of single tokens and turns are not averaged away by a loss per sequence."""

from __future__ import annotations

import pytest
import torch

from areal_gym.config import TrainerConfig, load_config
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry
from areal_gym.runs.make_trainer import make_trainer
from areal_gym.trainer.algorithms.losses import LossInputs, LossOutput
from areal_gym.trainer.algorithms.ratios import sequence_mean
from areal_gym.trainer.trainer import Trainer
from tests._support.tiny_training import batch, tiny_decoder


def learner(own_loss=None, **config) -> Trainer:
    settings = TrainerConfig.model_validate(config)
    return Trainer(
        tiny_decoder(),
        settings,
        advantage=registry().load("advantages", settings.advantage),
        loss=own_loss or registry().load("losses", settings.loss),
    )


@pytest.mark.parametrize("advantage", ["gae", "per_turn", "reinforce_pp", "distill"])
@pytest.mark.parametrize(
    "loss", [{"loss": "gspo"}, {"loss": "sapo", "loss_kwargs": {"level": "sequence"}}]
)
def test_sequence_loss_refuses_token_advantages(advantage, loss):
    with pytest.raises(ConfigError, match="credit of single turns would be lost") as caught:
        learner(advantage=advantage, **loss)
    assert any("trainer.loss_kwargs.level=token" in hint for hint in caught.value.hints)
    learner(advantage=advantage, **{**loss, "loss_kwargs": {"level": "token"}})


def test_sequence_loss_refuses_token_penalties():
    settings = {"algorithm": "gspo", "kl": {"coefficient": 0.1, "place": "reward"}}
    with pytest.raises(ConfigError, match=r"trainer.kl.place = 'reward'"):
        learner(**settings)


def test_custom_loss_is_probed_for_its_credit_level():
    def per_sequence(tokens: LossInputs) -> LossOutput:
        advantages_T = sequence_mean(tokens.advantages, tokens.sequence_ids)
        return LossOutput(loss=-advantages_T * tokens.logprobs)

    def without_advantages(tokens: LossInputs) -> LossOutput:
        return LossOutput(loss=-tokens.logprobs)

    with pytest.raises(ConfigError, match="'per_sequence'"):
        learner(per_sequence, advantage="gae")
    learner(without_advantages, advantage="gae")


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_pp_baseline", "lite_ppo"])
def test_trajectory_advantages_work_with_sequence_loss(advantage):
    learner(advantage=advantage, loss="gspo")


def test_mismatched_credit_is_refused_before_rollouts(tiny_policy):
    config = load_config(
        overrides=[
            f"engine.model={tiny_policy}",
            "trainer.algorithm=gspo",
            "trainer.advantage=per_turn",
        ]
    )
    with pytest.raises(ConfigError, match="one advantage, their mean"):
        make_trainer(config, tiny_policy)


def test_gspo_token_credits_the_turn_that_earned_the_reward():
    """Turns with rewards of their own: the gradient is another one than that of their mean."""
    groups = batch(num_groups=4)
    settings = {"algorithm": "gspo", "clip_low": None, "clip_high": None, "loss": "gspo"}

    def moved(**further) -> torch.Tensor:
        trained = learner(**settings, **further)
        trained.step(groups, 0)
        means = [t for name, t in trained.states().items() if name.endswith(".exp_avg")]
        return torch.cat([mean.flatten() for mean in means])

    credit = moved(advantage="per_turn", advantage_kwargs={"by": "turn"}, loss_kwargs=TOKEN)
    same = moved(loss_kwargs=TOKEN)
    assert float((same - moved()).norm() / same.norm()) < 1e-5
    assert float((same - credit).norm() / same.norm()) > 0.01


TOKEN = {"level": "token"}


@pytest.mark.parametrize("loss", ["sapo", "gspo"])
def test_aggregation_follows_the_setting(loss):
    assert TrainerConfig.model_validate({"algorithm": loss}).aggregation == "seq_mean"
    assert TrainerConfig.model_validate({"loss": loss}).aggregation == "token_mean"
    obeyed = TrainerConfig.model_validate({"algorithm": loss, "aggregation": "token_mean"})
    assert obeyed.aggregation == "token_mean"
