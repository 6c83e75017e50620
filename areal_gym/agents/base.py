"""The agent contract: how the policy is asked in one episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from areal_gym.types import Message

if TYPE_CHECKING:
    from areal_gym.envs.base import StepResult
    from areal_gym.envs.tools import Tool

__all__ = ["Agent", "Episode"]


@runtime_checkable
class Episode(Protocol):
    """One episode as an agent sees it: a policy to ask and an environment to answer.

    Everything is recorded token by token on the other side of this protocol.
    """

    @property
    def first_messages(self) -> Sequence[Message]:
        """System and user messages that open the episode."""
        ...

    @property
    def tools(self) -> Sequence[Tool]:
        """The environment's tools, in their fixed order."""
        ...

    async def ask(
        self, new_messages: Sequence[Message], *, replaces_history: bool = False
    ) -> Message:
        """Append `new_messages` to the dialogue and let the policy answer.

        With `replaces_history` they are all that the policy sees, as after a summary of what went
        before. What it has sampled so far stays in the trajectory, as a branch of its own.

        Raises:
            EngineError: the policy could not be sampled.
        """
        ...

    async def act(self, message: Message) -> StepResult:
        """Hand an assistant message to the environment (Gymnasium's `step`, with names)."""
        ...


@runtime_checkable
class Agent(Protocol):
    """Decides how the policy is asked."""

    async def play(self, episode: Episode) -> None:
        """Play one episode to its end. Exceptions are recorded as `agent_error`."""
        ...
