"""Plays many episodes at once, for training and for evaluation.

    runner        plays groups of episodes and hands batches to the trainer
    groups        tracks the state of each group
    scheduler     runs episodes in a limited number of slots; `failures` decides about retries
    episode       plays one episode
    evaluate      measures a policy on held-out tasks

The package is callable: `areal_gym.rollout(policy, env, n)` plays episodes outside of training. The
function itself is in `areal_gym.runs.episodes`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    # The function and the package share a name, and importing the package would hide a function.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from areal_gym.runs.episodes import rollout

        return rollout(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
