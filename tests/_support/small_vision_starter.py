"""A starter policy that sees and is made in seconds."""

from dataclasses import dataclass

from areal_gym.warm_start.vision_starter import VisionRecipe


@dataclass(frozen=True, kw_only=True)
class SmallVisionRecipe(VisionRecipe):
    """A recipe of 0.4 million parameters."""

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    ffn_size: int = 128
    tower_depth: int = 2
    max_side: int = 64
    num_tokenizer_texts: int = 60
    batch_size: int = 16
    lr: float = 3e-3
    num_probes: int = 64
    skill_gate: float = 0.6
