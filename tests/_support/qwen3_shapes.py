"""The shapes of published models, which no test downloads."""

import transformers

QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
}
"""Hidden and intermediate size, layers, heads, tied embeddings: as their config.json says."""
QWEN3_MIXTURES = {
    "30B-A3B": (2048, 6144, 48, 32, 768),
    "235B-A22B": (4096, 12288, 94, 64, 1536),
}
"""Hidden and intermediate size, layers, heads, width of an expert; 8 of 128 experts are chosen."""


SEEING = ("Qwen2.5-VL-3B", "VL-4B")
"""Qwen2.5-VL and Qwen3-VL."""


def config_json(name):
    """The content of a model's config.json: "8B", "30B-A3B", "VL-4B"."""
    if name in SEEING:
        return _qwen2_5_vl_3b() if name == SEEING[0] else _qwen3_vl_4b()
    if name in QWEN3_MIXTURES:
        return _mixture(*QWEN3_MIXTURES[name])
    hidden, intermediate, layers, heads, is_tied = QWEN3[name]
    return transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=is_tied,
    ).to_dict()


def _mixture(hidden, intermediate, layers, heads, expert):
    return transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        moe_intermediate_size=expert,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ).to_dict()


def _qwen2_5_vl_3b():
    text = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True
    )
    return config.to_dict()


def _qwen3_vl_4b():
    text = {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    }
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True
    )
    return config.to_dict()
