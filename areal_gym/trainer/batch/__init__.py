"""Converts trajectories and examples to packed token batches."""
