"""The agent of online runs: a program outside, which opens the episode over HTTP."""

from __future__ import annotations

from areal_gym.agents.base import Episode


class OnlineAgent:
    """Offers the episode, and waits until the program that has taken it ends it.

    The episode's time begins when it is taken.

    Args:
        max_calls: of the policy, in one episode.
    """

    def __init__(self, max_calls: int = 256) -> None:
        self._max_calls = max_calls

    async def play(self, episode: Episode) -> None:
        """Wait for somebody to play."""
        access = await episode.access(max_calls=self._max_calls)
        with episode.idle():
            await access.claimed()
        await access.ended()
        await episode.finish()
