"""Episodes that run in code of others: environments that play themselves, and their failures."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from areal_gym.agents.base import Episode
from areal_gym.envs.base import TextEnv
from areal_gym.errors import UsageError


@runtime_checkable
class PlaysItself(Protocol):
    """An environment that another library plays, by its own loop, and that needs a policy only."""

    max_policy_calls: int

    async def play_outside(self, base_url: str, api_key: str) -> None:
        """Play the episode to its end; its outcome is the next response."""


async def play_outside(episode: Episode, env: PlaysItself) -> None:
    """Let the environment play the episode itself, with the policy at the gateway."""
    endpoint = await episode.access(max_calls=env.max_policy_calls)
    await env.play_outside(endpoint.base_url, endpoint.api_key)
    await episode.finish("")


def require_no_agent(env: TextEnv, agent_id: str) -> None:
    """Raise UsageError if an agent was asked to play an environment that plays itself."""
    if agent_id != "chat" and isinstance(env, PlaysItself):
        raise UsageError(
            f"{type(env).__name__} plays its episodes itself: no agent can", hints=["--agent chat"]
        )


def is_failure(error: BaseException) -> bool:
    """Return whether an exception fails the episode: not the run's own cancellation, nor Ctrl-C.

    Libraries that behave like a program exit, or raise a `BaseException`: those fail the episode.
    A cancellation that was not requested for this task is the agent's or environment's own.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() == 0
    return not isinstance(error, GeneratorExit) and type(error) is not KeyboardInterrupt
