"""A user that follows a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from areal_gym.envs.tau2.domain_state import CallResult
from areal_gym.envs.tau2.users.base import STOP, UserFactory, UserTurn


class ScriptedUser:
    """Takes its turns from a list, whatever it hears; ends the conversation after the last.

    Example: `ScriptedUser("Hello.", [UserTurn(calls=[("toggle_data", {})]), UserTurn("Done.")])`
    """

    def __init__(self, opening: str, turns: Iterable[UserTurn] = ()) -> None:
        self._opening = opening
        self._turns = iter(turns)

    @classmethod
    def factory(cls, opening: str, turns: Sequence[UserTurn] = ()) -> UserFactory:
        """Return a user factory for a `Simulation`; every conversation restarts the script."""
        return lambda scene: cls(opening, turns)

    def open(self, greeting: str) -> str:
        """Return the opening of the script."""
        return self._opening

    async def respond(self, event: str | Sequence[CallResult]) -> UserTurn:
        """Return the next turn."""
        return next(self._turns, UserTurn(STOP))
