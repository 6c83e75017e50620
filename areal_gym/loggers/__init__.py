"""Destinations of metrics besides `metrics.jsonl`; `base` has the contract."""
