"""Training: batches, losses, optimizer, checkpoints and publication of weights."""
