"""Tasks that consist of a seed, for environments of other libraries."""

from __future__ import annotations

import numpy as np

from areal_gym.types import Task

_MOST = 2**30


class SeedTasks:
    """Even seeds train, odd ones test; `task.data` holds the `seed`."""

    def num_tasks(self, split: str) -> int | None:
        """Return None: the tasks are endless."""
        return None

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Draw a random seed of the split."""
        return self.at(int(rng.integers(_MOST)), split)

    def at(self, index: int, split: str) -> Task:
        """Return the seed of that index."""
        seed = 2 * index + (split == "test")
        return Task(id=f"{split}/{seed}", data={"seed": seed}, split=split)
