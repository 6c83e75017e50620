"""Engines: token ids in; token ids, log-probabilities and policy version out."""
