"""Models that can be trained and sampled: the tiny decoder, devices, cost and process groups."""
