"""Algorithm parts: advantages, policy losses, ratios, corrections and reward shaping."""
