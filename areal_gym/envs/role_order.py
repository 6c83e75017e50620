"""The roles of an environment: whose turn it is, and what each role has read and written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from areal_gym.errors import EnvError, choices
from areal_gym.types import Message

if TYPE_CHECKING:
    from areal_gym.envs.responses import Info


class RolePolicy(Protocol):
    """Plays a role that is not trained."""

    async def answer(self, env: Any, seed: int) -> str:
        """Return the message of the role whose turn it is in `env`, a `TextEnv`.

        Raises:
            EpisodeError: there is no answer; the episode has failed.
        """


class RoleOrder:
    """Follows the roles of one episode.

    Args:
        roles: the environment's roles; the first one writes first. Empty without roles.
        messages: the messages that the first role reads.
    """

    def __init__(self, roles: Sequence[str] = (), messages: Sequence[Message] = ()) -> None:
        self.role: str | None = roles[0] if roles else None
        """The role that writes next."""
        self._roles = roles
        self._dialogues: dict[str | None, list[Message]] = {self.role: list(messages)}
        self._spoken: set[str] = set()

    @property
    def dialogue(self) -> Sequence[Message]:
        """The messages that the role which writes next has read and written."""
        return self._dialogues.get(self.role, ())

    def wrote(self, message: Message) -> None:
        """Record what the role whose turn it is has written."""
        self._dialogues[self.role].append(message)
        if self.role is not None:
            self._spoken.add(self.role)

    def go_on(self, info: Info, source: str, *, is_over: bool) -> None:
        """Pass the turn on as a step's info says; add the next role to it.

        Raises:
            EnvError: a role is unknown, is rewarded before it has written, or has nothing to read.
        """
        for role in info.get("role_rewards", {}):
            self._require_known(role, source, "rewarded")
            if role not in self._spoken:
                raise EnvError(
                    f"{source} rewarded the role {role!r}, which has written nothing in this "
                    "episode: there is no turn that the reward could belong to",
                    hints=[f"roles that have written: {', '.join(sorted(self._spoken)) or 'none'}"],
                )
        if (role := info.get("role", self.role)) is None:
            self._dialogues[None] += info["messages"]
            return
        self._require_known(role, source, "gave the turn to")
        self.role = info["role"] = role
        dialogue = self._dialogues.setdefault(role, [])
        dialogue += info["messages"]
        if not dialogue and not is_over:
            raise EnvError(
                f"{source} gave the turn to the role {role!r}, which has nothing to read",
                hints=["the first messages of a role say what it plays: Response(messages=[...])"],
            )

    def _require_known(self, role: str, source: str, what: str) -> None:
        if role in self._roles:
            return
        no_roles = ["the environment has no roles: set the class attribute `roles`"]
        raise EnvError(
            f"{source} {what} the role {role!r}, which the environment does not have",
            hints=choices(role, self._roles) if self._roles else no_roles,
        )
