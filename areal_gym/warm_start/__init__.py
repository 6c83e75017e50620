"""Warm start: the small starter policy, its tokenizer and its demonstrations."""
