"""What a user is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from areal_gym.envs.tau2.world import CallResult, World

if TYPE_CHECKING:
    from areal_gym.envs.tau2.data import Case, Domain

__all__ = [
    "GIVE_UP",
    "OUT_OF_SCOPE",
    "STOP",
    "STOP_TOKENS",
    "TRANSFER",
    "Scene",
    "User",
    "UserFactory",
    "UserTurn",
]

STOP = "###STOP###"
TRANSFER = "###TRANSFER###"
OUT_OF_SCOPE = "###OUT-OF-SCOPE###"
STOP_TOKENS = (STOP, TRANSFER, OUT_OF_SCOPE)
"""A text of the user with one of these ends the conversation, which is then judged."""
GIVE_UP = "This is not helping me. Goodbye."
"""What a rule-based user says when it hangs up unheard: the end, and no verdict but 0."""


class UserTurn(NamedTuple):
    """What a user does: says something, or calls tools of its own (name, arguments)."""

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What a user may know when it is made."""

    domain: Domain
    case: Case
    world: World
    """To be looked at only: the user acts by its turns."""


class User(Protocol):
    """Plays the user of one conversation."""

    async def respond(self, event: str | Sequence[CallResult]) -> UserTurn:
        """Answer what the assistant said, or go on after one's own tool calls.

        Raises:
            EnvError: the user cannot be asked (a language model's server is down).
        """
        ...


UserFactory = Callable[[Scene], User]
