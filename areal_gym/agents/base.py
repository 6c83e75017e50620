"""The agent contract: how the policy is asked in one episode."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from areal_gym.types import Message

if TYPE_CHECKING:
    from areal_gym.envs.base import StepResult
    from areal_gym.envs.tools import Tool

__all__ = ["Agent", "Episode", "PolicyEndpoint"]


class PolicyEndpoint(Protocol):
    """How a program reaches the policy of one episode: as it would reach OpenAI."""

    @property
    def base_url(self) -> str:
        """Of the gateway, with `/v1`."""
        ...

    @property
    def api_key(self) -> str:
        """The episode's secret. It is worth nothing after the episode."""
        ...

    async def claimed(self) -> None:
        """Offer the episode to programs outside, and wait until one has opened it."""
        ...

    async def ended(self) -> None:
        """Wait until that program has ended it.

        Raises:
            AgentError: it says that it has failed.
        """
        ...


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

    @property
    def is_over(self) -> bool:
        """Whether it has ended, by the environment or by a limit: the policy answers no more."""
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

    # ---- for agents that are programs and ask over HTTP ----------------------------------------

    async def access(self, *, max_calls: int) -> PolicyEndpoint:
        """Where programs reach the policy; what they ask there is recorded as what `ask` asks.

        Args:
            max_calls: so many answers, and more are refused: the episode is then truncated.
        """
        ...

    async def call_tool(self, call_id: str) -> str:
        """What a call gave that the policy has made over HTTP; the environment answers.

        All calls of one message are handed to the environment together, whichever comes first.

        Raises:
            AgentError: the policy made no such call.
        """
        ...

    async def reply(self, answer: str) -> Sequence[Message]:
        """Hand a text of the agent to the environment: what it answers, nothing at the end."""
        ...

    async def finish(
        self,
        answer: str | None = None,
        *,
        reward: float | None = None,
        is_truncated: bool = False,
    ) -> None:
        """The agent is done, also where the environment would go on.

        Args:
            answer: handed to the environment, which may reward it.
            reward: added to that of the last turn.
            is_truncated: the agent has met a limit of its own on turns.

        Raises:
            AgentError: the reward is no finite number.
        """
        ...

    def idle(self) -> AbstractContextManager[None]:
        """Time inside does not count against the episode's limit: somebody thinks."""
        ...


@runtime_checkable
class Agent(Protocol):
    """Decides how the policy is asked."""

    async def play(self, episode: Episode) -> None:
        """Play one episode to its end. Exceptions are recorded as `agent_error`."""
        ...
