"""Episodes whose loop is in another library, and the failures of code that is not ours."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from areal_gym.agents.base import Episode
from areal_gym.envs.base import TextEnv
from areal_gym.errors import UsageError


@runtime_checkable
class PlaysItself(Protocol):
    """An environment whose episodes another library plays with its own loop, given a policy."""

    max_policy_calls: int

    async def play_outside(self, base_url: str, api_key: str) -> None:
        """Play the episode to its end; the result of the next `step` holds its outcome."""


async def play_outside(episode: Episode, env: PlaysItself) -> None:
    """Let the environment play the episode itself and call the policy at the gateway."""
    endpoint = await episode.access(max_calls=env.max_policy_calls)
    await env.play_outside(endpoint.base_url, endpoint.api_key)
    await episode.finish("")


def require_no_agent(env: TextEnv, agent_id: str) -> None:
    """Raise UsageError if an agent was chosen for an environment that plays itself."""
    if agent_id != "chat" and isinstance(env, PlaysItself):
        raise UsageError(
            f"{type(env).__name__} plays its episodes itself: no agent can", hints=["--agent chat"]
        )


def is_failure(error: BaseException) -> bool:
    """Return whether an exception fails the episode, unlike the run's own cancellation or Ctrl-C.

    Libraries that are written as programs call `sys.exit` or raise a `BaseException`, which fails
    the episode. A `CancelledError` fails it as well if this task was not cancelled: it is the
    agent's or the environment's own.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() == 0
    return not isinstance(error, GeneratorExit) and type(error) is not KeyboardInterrupt
