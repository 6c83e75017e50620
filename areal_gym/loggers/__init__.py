"""Destinations of metrics besides `metrics.jsonl`; `base` defines the interface."""
