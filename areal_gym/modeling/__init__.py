"""The decoder that the embedded engine samples and the trainer improves."""

from __future__ import annotations

from areal_gym.modeling.checkpoint import load_checkpoint, save_checkpoint
from areal_gym.modeling.config import DecoderConfig
from areal_gym.modeling.decoder import Attend, Decoder, build_decoder, causal_attend
from areal_gym.modeling.reward_model import RewardModel, load_reward_model

__all__ = [
    "Attend",
    "Decoder",
    "DecoderConfig",
    "RewardModel",
    "build_decoder",
    "causal_attend",
    "load_checkpoint",
    "load_reward_model",
    "save_checkpoint",
]
