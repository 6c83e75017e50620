"""Tiny random transformers models, one of each shape that our decoder runs."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB_SIZE = 97
WINDOW = 16
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

SHAPES: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (transformers.Qwen2Config, QWEN_WINDOW),
    "qwen2-yarn": (transformers.Qwen2Config, {"rope_parameters": YARN_ROPE}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3-tied": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-yarn": (
        transformers.Qwen3Config,
        {"head_dim": 16, "rope_parameters": YARN_ROPE | {"truncate": False, "beta_fast": 4.0}},
    ),
    "llama": (transformers.LlamaConfig, {}),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "mistral-v0.1": (transformers.MistralConfig, {"sliding_window": WINDOW}),
    "mistral-v0.3": (
        transformers.MistralConfig,
        {"sliding_window": None, "head_dim": 16, "rope_parameters": {"rope_theta": 1e6}},
    ),
    "gemma": (transformers.GemmaConfig, {"head_dim": 16}),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
}


def tiny_model(shape: str, **extra: Any) -> transformers.PreTrainedModel:
    """The model of a shape, in evaluation mode; the same weights at each call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make_config, settings = SHAPES[shape]
    # Tokens of its own for begin and end: the defaults may lie outside the tiny vocabulary.
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = make_config(**{**SIZES, **special, **settings, **extra})
    # Only the eager attention of transformers has soft caps.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which start at 0 or 1
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def their_logits(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """[T, V]"""
    with torch.no_grad():
        return model(ids[None]).logits[0]
