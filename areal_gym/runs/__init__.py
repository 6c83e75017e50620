"""The composition root: from settings to objects, and a run from its first line to its last."""
