"""The composition root: makes objects from settings, and drives a run from start to end."""
