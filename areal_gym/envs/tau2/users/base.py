"""The contract of users, and their first message, which follows from the task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from areal_gym.envs.tau2.domain_state import CallResult, World

if TYPE_CHECKING:
    from areal_gym.envs.tau2.benchmark_data import Case, Domain

STOP = "###STOP###"
TRANSFER = "###TRANSFER###"
OUT_OF_SCOPE = "###OUT-OF-SCOPE###"
STOP_TOKENS = (STOP, TRANSFER, OUT_OF_SCOPE)
"""A text of the user with one of these ends the conversation, which is then judged."""
GIVE_UP = "This is not helping me. Goodbye."
"""The last message of a rule-based user that gives up; the conversation ends with reward 0."""


class UserTurn(NamedTuple):
    """A user's turn: a text, or calls of the user's own tools (name, arguments)."""

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The information that a user gets when it is made."""

    domain: Domain
    case: Case
    world: World
    """For reading only: the user acts by its turns."""


class User(Protocol):
    """Plays the user of one conversation."""

    def open(self, greeting: str) -> str:
        """Return the first message, without waiting for anything, because `reset` does not wait."""
        ...

    async def respond(self, event: str | Sequence[CallResult]) -> UserTurn:
        """Answer the assistant's message, or continue after the user's own tool calls.

        Raises:
            EnvError: the user cannot be asked (a language model's server is down).
        """
        ...


UserFactory = Callable[[Scene], User]


_FIRST_PERSON = (
    (r"\b[Yy]ou are\b", "I am"),
    (r"\b[Yy]ou're\b", "I'm"),
    (r"\b[Yy]ou were\b", "I was"),
    (r"\b[Yy]ou've\b", "I've"),
    (r"\b[Yy]ou'd\b", "I'd"),
    (r"\b[Yy]ou'll\b", "I'll"),
    (
        r"\b(to|for|with|from|of|give|gives|gave|tell|tells|send|offer|offers|let|lets) you\b",
        r"\1 me",
    ),
    (r"\bYourself\b|\byourself\b", "myself"),
    (r"\bYours\b|\byours\b", "mine"),
    (r"\bYour\b", "My"),
    (r"\byour\b", "my"),
    (r"\b[Yy]ou\b", "I"),
)


@lru_cache(maxsize=4096)
def in_first_person(text: str) -> str:
    """Rewrite "You want your money" as "I want my money"."""
    for pattern, replacement in _FIRST_PERSON:
        text = re.sub(pattern, replacement, text)
    return text


def opening_of(case: Case) -> str:
    """Return the user's reason for the call in the user's words."""
    return in_first_person(str(case.instructions.get("reason_for_call") or "Hello, I need help."))
