"""`countdown/reminder`: how an agent shapes what the policy is asked."""

from __future__ import annotations

from collections.abc import Sequence

from areal_gym import Episode, Message

__all__ = ["ReminderAgent"]

RULES = "Use each number once; write the expression only."


class ReminderAgent:
    """A plain dialogue that repeats the rules in every request.

    Args:
        rules: what is repeated.
    """

    def __init__(self, rules: str = RULES) -> None:
        self.rules = rules

    async def play(self, episode: Episode) -> None:
        """Ask, act, repeat."""
        messages = episode.first_messages
        while True:
            result = await episode.act(await episode.ask(self._remind(messages)))
            if result.terminated or result.truncated:
                return
            messages = result.info["messages"]

    def _remind(self, messages: Sequence[Message]) -> list[Message]:
        *others, last = messages
        reminded = last.copy()
        reminded["content"] = f"{last['content']} {self.rules}"
        return [*others, reminded]
