"""The agent of online runs: an external program opens the episode over HTTP and plays it."""

from __future__ import annotations

from areal_gym.agents.base import Episode


class OnlineAgent:
    """Offers the episode, and waits until the program that claimed it ends it.

    The episode's time starts when it is claimed.

    Args:
        max_calls: the most policy calls of one episode.
    """

    def __init__(self, max_calls: int = 256) -> None:
        self._max_calls = max_calls

    async def play(self, episode: Episode) -> None:
        """Wait until a program has claimed the episode, and then until it has ended it."""
        endpoint = await episode.access(max_calls=self._max_calls)
        with episode.idle():
            await endpoint.claimed()
        await endpoint.ended()
        await episode.finish()
