"""The default agent: the policy and the environment take turns until the episode ends."""

from __future__ import annotations

from areal_gym.agents.base import Episode


class ChatAgent:
    """Plays a plain dialogue."""

    async def play(self, episode: Episode) -> None:
        """Ask the policy, hand its answer to the environment, and repeat until the episode ends."""
        messages = episode.first_messages
        while True:
            result = await episode.act(await episode.ask(messages))
            if result.terminated or result.truncated:
                return
            messages = result.info["messages"]
