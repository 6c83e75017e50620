"""The starter policy of environments with pictures: a small Qwen3-VL, warm-started.

It imitates the gold policy until its likeliest answers to unseen tasks are right (an answer that it
never samples is never reinforced), or sampled ones earn a quarter of what is above guessing: their
expected reward is the mean of p(gold answers | pictures, texts). Reinforcement learning does the
rest.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from areal_gym.config import TrainerConfig
from areal_gym.envs.base import TextEnv
from areal_gym.trainer.batch.examples import Example, placed_micro_batches
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.objectives.supervised import Sft, Supervised
from areal_gym.warm_start.demonstrations import Demonstration, perfect_demonstration
from areal_gym.warm_start.starter_tokenizer import END_OF_TEXT, IM_END

if TYPE_CHECKING:
    from areal_gym.models.hf.hf_policy import HFPolicy

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
VISION_TOKENS = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
"""Control tokens of policies that see."""
_MERGE = 2
"""Patches of a side that become one token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionRecipe:
    """The settings of a starter policy that sees, besides its environment and seed."""

    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 24
    ffn_size: int = 192
    tower_depth: int = 3
    tower_heads: int = 2
    patch_size: int = 8
    max_side: int = 128
    """Larger pictures are scaled to so many pixels squared."""
    vocab_size: int = 384
    max_context: int = 1024
    num_tokenizer_texts: int = 300
    batch_size: int = 32
    lr: float = 2e-3
    warmup_steps: int = 20
    min_steps: int = 10
    max_steps: int = 300
    skill_gate: float = 0.95
    """The share of right likeliest answers at which imitation ends."""
    sure_gate: float = 0.28
    """The place of the expected reward between blind guesses (0) and certainty (1), likewise."""
    num_probes: int = 128
    probe_every: int = 5


def write_image_settings(directory: Path, recipe: VisionRecipe) -> None:
    """Write `preprocessor_config.json`: how pictures become patches."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": recipe.patch_size,
        "merge_size": _MERGE,
        "temporal_patch_size": 2,
        "size": {
            "shortest_edge": (_MERGE * recipe.patch_size) ** 2,
            "longest_edge": recipe.max_side**2,
        },
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def build_vision_policy(
    directory: Path, recipe: VisionRecipe, tokenizer: Tokenizer, *, seed: int
) -> HFPolicy:
    """Return a policy with fresh weights; `directory` gets its `config.json`."""
    from areal_gym.models.hf.hf_loading import build_policy
    from areal_gym.models.hf.hf_vision import HFVision

    config = _config(recipe, tokenizer)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(directory)
    policy = build_policy(config, seed=seed)
    policy.vision = HFVision.from_checkpoint(directory, policy.network)
    return policy


def imitate_gold(
    policy: HFPolicy,
    env: TextEnv,
    encode: Callable[[Demonstration], Example],
    recipe: VisionRecipe,
    seed: int,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Train the policy on gold episodes, and return facts about it."""
    settings = TrainerConfig.model_validate(
        {"lr": recipe.lr, "warmup_steps": recipe.warmup_steps, "vision": "full"}
    )
    trainer = Supervised(policy, settings, objective=Sft())
    probe_rng, rng = random.Random(f"probes/{seed}"), random.Random(seed)
    probes = [encode(perfect_demonstration(env, probe_rng)) for _ in range(recipe.num_probes)]
    blind = env.blind_reward or 0.0
    sure_gate = blind + recipe.sure_gate * (1 - blind)
    step, sampled, greedy = 0, 0.0, 0.0
    while step < recipe.max_steps and greedy < recipe.skill_gate and sampled < sure_gate:
        shown = [perfect_demonstration(env, rng) for _ in range(recipe.batch_size)]
        loss = trainer.step([encode(each) for each in shown])["train/loss"]
        step += 1
        if step >= recipe.min_steps and step % recipe.probe_every == 0:
            sampled, greedy = _skill(policy, probes, settings.tokens_per_microbatch)
        if on_progress is not None:
            detail = f"loss {loss:.2f}  sees {greedy:.0%}  expected reward {sampled:.2f}"
            on_progress(step, recipe.max_steps, detail)
    return {
        "num_steps": step,
        "skill": round(greedy, 4),
        "expected_reward": round(sampled, 4),
        "guessing": round(blind, 4),
        "demonstrators": {},
    }


@torch.no_grad()
def _skill(policy: HFPolicy, probes: list[Example], budget: int) -> tuple[float, float]:
    """Return the expected reward of sampled answers, and the share of right likeliest ones."""
    expected, num_right = 0.0, 0
    for batch, indexes in placed_micro_batches(probes, budget, "cpu"):
        masks = [probes[index][0].mask for index in indexes]
        scores = score_tokens(policy, batch, masks)
        lengths = [sum(mask) for mask in masks]
        expected += sum(float(p.sum().exp()) for p in torch.split(scores.logprobs, lengths))
        num_right += sum(bool(p.all()) for p in torch.split(scores.is_likeliest, lengths))
    return expected / len(probes), num_right / len(probes)


def _config(recipe: VisionRecipe, tokenizer: Tokenizer) -> Any:
    from transformers import Qwen3VLConfig

    half = recipe.head_dim // 2
    section = 3 * half // 8  # of height and of width: the shares of the real models
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.ffn_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": recipe.max_context,
        "initializer_range": 0.05,
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(IM_END),
        "bos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [half - 2 * section, section, section],
            "mrope_interleaved": True,
        },
    }
    tower = {
        "depth": recipe.tower_depth,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.ffn_size,
        "out_hidden_size": recipe.hidden_size,
        "num_heads": recipe.tower_heads,
        "patch_size": recipe.patch_size,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": (recipe.max_side // recipe.patch_size) ** 2,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.05,
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = (IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END)
    return Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        **{name: tokenizer.token_to_id(t) for name, t in zip(names, tokens, strict=True)},
    )
