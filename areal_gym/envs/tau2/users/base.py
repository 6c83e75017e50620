"""What a user is, and how its first words follow from the task."""

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

    def open(self, greeting: str) -> str:
        """The first words. They wait for nobody, because `reset` does not."""
        ...

    async def respond(self, event: str | Sequence[CallResult]) -> UserTurn:
        """Answer what the assistant said, or go on after one's own tool calls.

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
    """ "You want your money" -> "I want my money"."""
    for pattern, replacement in _FIRST_PERSON:
        text = re.sub(pattern, replacement, text)
    return text


def opening_of(case: Case) -> str:
    """Why the user calls, as the user would say it."""
    return in_first_person(str(case.instructions.get("reason_for_call") or "Hello, I need help."))
