"""Log-probabilities of an engine that rounds: the first on-policy update is float32's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from areal_gym.config import TrainerConfig
from areal_gym.plugins import registry
from areal_gym.trainer.algorithms.token_loss import narrowest_clip
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Group, Trajectory
from tests._support.tiny_training import batch, honest_logprobs, tiny_decoder

PRESETS = ["grpo", "dapo", "gspo", "sapo", "cispo", "ppo", "dr_grpo", "m2po"]


def learner(**config) -> Trainer:
    settings = TrainerConfig.model_validate(config)
    return Trainer(
        tiny_decoder(),
        settings,
        advantage=registry().load("advantages", settings.advantage),
        loss=registry().load("losses", settings.loss),
    )


def rounded(groups: list[Group]) -> list[Group]:
    """The same groups, with log-probabilities of eight significant bits."""

    def of(played: Trajectory) -> Trajectory:
        spans = tuple(
            replace(s, logprobs=tuple(torch.tensor(s.logprobs).bfloat16().float().tolist()))
            if s.origin == "policy"
            else s
            for s in played.spans
        )
        return replace(played, spans=spans)

    return [replace(g, trajectories=tuple(of(t) for t in g)) for g in groups]


def gradient(trained: Trainer, groups: list[Group]) -> tuple[torch.Tensor, dict[str, float]]:
    metrics = trained.step(groups, version=0)
    means = [tensor for name, tensor in trained.states().items() if name.endswith(".exp_avg")]
    return 10 * torch.cat([mean.flatten() for mean in means]), metrics


@pytest.mark.parametrize("name", PRESETS)
def test_first_update_equals_that_of_an_exact_engine(name):
    exact_groups = honest_logprobs(tiny_decoder(), batch(num_groups=4))
    expected, exact = gradient(learner(algorithm=name, max_grad_norm=1e6), exact_groups)
    told = learner(algorithm=name, max_grad_norm=1e6)
    told.recompute_proximal()
    found, metrics = gradient(told, rounded(exact_groups))
    assert metrics["train/engine_gap"] > 1e-3 > 1e-5 > exact["train/engine_gap"]
    assert metrics.get("train/clip_fraction", 0.0) == 0
    assert metrics["train/ratio"] == 1
    assert float((found - expected).norm() / expected.norm()) < 0.02


def test_gspo_without_recomputation_clips_rounded_tokens():
    groups = rounded(honest_logprobs(tiny_decoder(), batch(num_groups=4)))
    assert gradient(learner(algorithm="gspo"), groups)[1]["train/clip_fraction"] > 0.2


def test_narrowest_clip_of_each_loss():
    def clip(**config):
        settings = TrainerConfig.model_validate(config)
        return narrowest_clip(registry().load("losses", settings.loss), settings)

    assert clip(algorithm="grpo") == 0.2
    assert clip(algorithm="gspo") == 3e-4
    assert clip(algorithm="gspo", clip_low=None) == 4e-4
    assert clip(algorithm="gspo", loss_kwargs={"clip_high": 1e-5}) == 1e-5
    assert clip(algorithm="cispo") == 4.0
    assert clip(algorithm="sapo") is None
    assert clip(algorithm="rloo") is None
