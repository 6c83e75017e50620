"""Environment instances, made once and used again."""

from __future__ import annotations

from collections.abc import Callable

from areal_gym.envs.base import TextEnv


class EnvPool:
    """Holds as many environment instances as were ever in use at once.

    `reset` makes a used instance as good as new, and `play_episode` has released what its episode
    held. An instance whose episode failed is in an unknown state: simply do not give it back.
    """

    def __init__(self, factory: Callable[[], TextEnv]) -> None:
        self._factory = factory
        self._free: list[TextEnv] = []

    def take(self) -> TextEnv:
        """Take an instance out of the pool; make one if none is free."""
        return self._free.pop() if self._free else self._factory()

    def give_back(self, env: TextEnv) -> None:
        """Put an instance back for another episode."""
        self._free.append(env)
