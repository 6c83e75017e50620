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


def config_json(name):
    """The content of a model's config.json: "8B", "30B-A3B"."""
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
