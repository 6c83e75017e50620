"""A user that says what it was told to say."""

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
        """For a `Simulation`: every conversation begins the script anew."""
        return lambda scene: cls(opening, turns)

    def open(self, greeting: str) -> str:
        """The opening of the script."""
        return self._opening

    async def respond(self, event: str | Sequence[CallResult]) -> UserTurn:
        """The next turn."""
        return next(self._turns, UserTurn(STOP))
