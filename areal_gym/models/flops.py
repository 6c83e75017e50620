"""Floating-point operations: a model's need, and a device's peak.

A product of [m, k] and [k, n] counts 2 m k n operations. Norms, activations, rotations and the
softmax are not counted, and neither is what is computed twice to save memory: this is what the
model needs ("model FLOPs", PaLM, arXiv 2204.02311, appendix B), independent of the implementation.
"""

from __future__ import annotations

import torch

from areal_gym.models.gpus import gpu_of_device
from areal_gym.models.policy_model import ModelShape, Shape


def forward_flops(
    config: Shape, *, num_tokens: float, num_pairs: float, num_logits: float
) -> float:
    """Return the operations of a forward pass.

    `num_tokens` go through the layers. `num_pairs` of queries and keys attend, in all layers
    together: n (n + 1) / 2 in a causal layer without a window. `num_logits` is the number of tokens
    whose next token is predicted; the last layer is for them, but for queries, keys and values.
    """
    if isinstance(config, ModelShape):
        num_embedding = config.vocab_size * config.hidden_size
        # Embeddings multiply nothing, and the output projection is for predicted tokens only.
        in_layers = max(0, config.num_active_parameters - 2 * num_embedding)
        return (
            2.0 * in_layers * num_tokens
            + 4.0 * config.attention_width * num_pairs
            + 2.0 * num_embedding * num_logits
        )
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    into_attention = hidden * (queries + 2 * keys)
    # Out of attention, and the three matrices of the MLP.
    after_it = hidden * queries + 3 * hidden * config.intermediate_size
    layers = 2.0 * config.num_hidden_layers * num_tokens * (into_attention + after_it)
    layers -= 2.0 * (num_tokens - num_logits) * after_it
    return layers + 4.0 * queries * num_pairs + 2.0 * hidden * config.vocab_size * num_logits


def training_flops(
    config: Shape, *, num_tokens: float, num_pairs: float, num_logits: float
) -> float:
    """Return the operations of a forward and a backward pass, which doubles each product."""
    return 3.0 * forward_flops(
        config, num_tokens=num_tokens, num_pairs=num_pairs, num_logits=num_logits
    )


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the nominal operations per second of a GPU, by its CUDA name; None if unknown."""
    gpu = gpu_of_device(device_name)
    if gpu is None:
        return None
    if dtype == "bfloat16":
        return gpu.bfloat16_flops
    # With a lower precision, float32 products run on tensor cores.
    is_plain = torch.get_float32_matmul_precision() == "highest"
    return gpu.float32_flops if is_plain else None
