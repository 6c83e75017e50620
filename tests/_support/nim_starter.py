"""A game of nim that a policy of a few seconds' training can play."""

from areal_gym.warm_start.starter_policy import Recipe

PILES = {"most_stones": 5, "most_taken": 2}
"""The arguments of the environment."""
SMALL = Recipe(
    hidden_size=64,
    ffn_size=128,
    num_heads=2,
    num_kv_heads=1,
    num_tokenizer_texts=200,
    vocab_size=300,
    batch_size=16,
    warmup_steps=5,
    min_hold_steps=40,
    max_hold_steps=80,
    decay_steps=20,
    num_probes=16,
    probe_every=10,
)
