"""Plays many episodes at once, for training and for evaluations.

    runner        the trainer's source of batches
    groups        the states of groups
    scheduler     slots; `failures` decides about retries
    episode       plays one episode
    evaluate      measures a policy

The package can be called as well: `areal_gym.rollout(policy, env, n)` plays episodes outside of
training (`areal_gym.runs.episodes`).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    # One name for the verb and for the package: importing the package would hide a function.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from areal_gym.runs.episodes import rollout

        return rollout(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
