"""Engine and trainer must be the same model."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch

from areal_gym.chat import Renderer
from areal_gym.config import load_config
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.errors import ConfigError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.runs.components import Components
from areal_gym.runs.make_trainer import make_trainer
from areal_gym.runs.probe import measure_gap, require_agreement

SMALL = ["env.id=countdown", "engine.max_context=256", "rollout.max_new_tokens=16"]


def gap_between(served, trained, *overrides, served_at=1.0, max_context=256):
    """The gap between an engine with one checkpoint and a trainer with another."""
    torch.set_num_threads(1)
    config = load_config(overrides=[f"engine.model={trained}", *SMALL, *overrides])

    async def measure():
        engine = EmbeddedEngine.from_checkpoint(served, num_slots=8, max_context=max_context)
        await engine.start()
        try:
            asked = config.model_copy(
                update={"rollout": config.rollout.model_copy(update={"temperature": served_at})}
            )
            learner = make_trainer(config, trained)
            renderer = Renderer.from_checkpoint(trained)
            return await measure_gap(asked, Components.of(config), engine, renderer, learner)
        finally:
            await engine.aclose()

    return config, asyncio.run(measure())


def test_probe_passes_equal_weights(tiny_policy):
    config, gap = gap_between(tiny_policy, tiny_policy)
    assert gap.mean < 1e-4
    assert gap.num_tokens > 8
    require_agreement(gap, config)


def test_probe_refuses_another_model(tiny_policy, tmp_path):
    decoder = load_checkpoint(tiny_policy)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3.0)
    other = save_checkpoint(decoder, tmp_path / "other", tokenizer_dir=tiny_policy)
    config, gap = gap_between(other, tiny_policy)
    with pytest.raises(ConfigError, match="not the same model") as caught:
        require_agreement(gap, config)
    assert any("temperature" in hint for hint in caught.value.hints)


def test_probe_detects_another_temperature(tiny_policy, tmp_path):
    decoder = load_checkpoint(tiny_policy)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3.0)
    sharp = save_checkpoint(decoder, tmp_path / "sharp", tokenizer_dir=tiny_policy)
    config, gap = gap_between(sharp, sharp, served_at=0.5)
    with pytest.raises(ConfigError, match="differ by"):
        require_agreement(gap, config)


def test_prompts_beyond_the_context_are_refused_with_hints(tiny_policy):
    with pytest.raises(ConfigError, match=r"have \d+ to \d+ tokens, and a sequence may have 32"):
        gap_between(tiny_policy, tiny_policy, max_context=32)


def test_probe_skips_single_prompts_beyond_the_context(tiny_policy):
    with pytest.raises(ConfigError) as caught:
        gap_between(tiny_policy, tiny_policy, max_context=32)
    shortest = int(re.search(r"have (\d+) to", caught.value.message)[1])
    _, gap = gap_between(tiny_policy, tiny_policy, max_context=shortest + 1)
    assert 1 <= gap.num_tokens < 8  # room for one token each, and not for all
