"""The decoder that the embedded engine samples and the trainer improves."""

from __future__ import annotations

from areal_gym.modeling.checkpoint import load_checkpoint, save_checkpoint
from areal_gym.modeling.config import DecoderConfig
from areal_gym.modeling.decoder import Attend, Decoder, build_decoder, causal_attend

__all__ = [
    "Attend",
    "Decoder",
    "DecoderConfig",
    "build_decoder",
    "causal_attend",
    "load_checkpoint",
    "save_checkpoint",
]
