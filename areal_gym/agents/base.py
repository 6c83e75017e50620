"""The agent contract: how the policy is asked in one episode."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from areal_gym.types import Message

if TYPE_CHECKING:
    from areal_gym.envs.base import StepResult
    from areal_gym.envs.tools import Tool
    from areal_gym.errors import EngineError
    from areal_gym.places import ProgramPlace

__all__ = ["Agent", "Episode", "PolicyEndpoint"]


class PolicyEndpoint(Protocol):
    """An HTTP endpoint of one episode's policy, compatible with OpenAI's and Anthropic's APIs."""

    @property
    def base_url(self) -> str:
        """The gateway's URL, with `/v1`."""

    def base_url_of(self, role: str, base_url: str | None = None) -> str:
        """Return the URL at which one role asks, in an episode that several roles play.

        `base_url` is the one that `listen_at` gave; by default the gateway's.
        """

    @property
    def api_key(self) -> str:
        """The episode's secret. It is worth nothing after the episode."""

    @property
    def num_calls(self) -> int:
        """The number of completions that the program has asked for."""

    @property
    def error(self) -> EngineError | None:
        """The failure of the newest call, if the policy could not be sampled."""

    async def listen_at(self, listener: socket.socket) -> str:
        """Serve this episode, and no other, at a listening socket; return the URL, with `/v1`."""

    async def claimed(self) -> None:
        """Offer the episode to external programs, and wait until one has opened it."""

    async def ended(self) -> None:
        """Wait until that program has ended the episode.

        Raises:
            AgentError: the program reports that it has failed.
        """


@runtime_checkable
class Episode(Protocol):
    """One episode as an agent sees it: a policy to ask and an environment to act in.

    The implementation records everything token by token.
    """

    @property
    def first_messages(self) -> Sequence[Message]:
        """System and user messages that open the episode."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The environment's tools, in their fixed order."""

    @property
    def roles(self) -> Sequence[str]:
        """The roles that the policy plays; empty where it plays alone."""

    @property
    def role(self) -> str | None:
        """The role whose turn it is: `ask` and `act` are its own."""

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended, by the environment or by a limit."""

    async def ask(
        self, new_messages: Sequence[Message], *, replaces_history: bool = False
    ) -> Message:
        """Append `new_messages` to the dialogue and let the policy answer.

        With `replaces_history` the policy sees these messages only, for example after a summary of
        the earlier ones. The turns so far stay in the trajectory, as a branch of their own.

        Raises:
            EngineError: the policy could not be sampled.
        """

    async def act(self, message: Message) -> StepResult:
        """Hand an assistant message to the environment (Gymnasium's `step`, with names)."""

    # ---- for agents that are programs and call the policy over HTTP ----------------------------

    async def access(self, *, max_calls: int) -> PolicyEndpoint:
        """Open an HTTP endpoint of the policy; its calls are recorded like those of `ask`.

        Args:
            max_calls: further calls are refused, and the episode is then truncated.
        """

    async def program_place(self) -> ProgramPlace | None:
        """Return where a program that plays the episode runs; None: on this machine."""

    async def call_tool(self, call_id: str) -> str:
        """Return the output of a tool call that the policy has made over HTTP.

        The environment gets all calls of one message together, with the first of them.

        Raises:
            AgentError: the policy made no such call.
        """

    async def reply(self, answer: str) -> Sequence[Message]:
        """Hand a text to the environment; return its reply, empty at the end of the episode."""

    async def finish(
        self,
        answer: str | None = None,
        *,
        reward: float | None = None,
        is_truncated: bool = False,
    ) -> None:
        """End the episode, even if the environment would continue.

        Args:
            answer: handed to the environment, which may reward it.
            reward: added to the reward of the last turn.
            is_truncated: the agent has reached its own limit on turns.

        Raises:
            AgentError: the reward is not a finite number.
        """

    def idle(self) -> AbstractContextManager[None]:
        """Return a context whose time does not count against the episode's limit."""


@runtime_checkable
class Agent(Protocol):
    """Decides how the policy is asked."""

    async def play(self, episode: Episode) -> None:
        """Play one episode to its end. Exceptions are recorded as `agent_error`."""
