"""The shapes of published models, which no test downloads."""

import transformers

QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
}
"""Hidden and intermediate size, layers, heads, tied embeddings: as their config.json says."""


def config_json(name):
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
