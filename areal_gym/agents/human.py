"""A person who watches the policy, and has the last word before the environment."""

from __future__ import annotations

import asyncio
import sys

from areal_gym.agents.base import Episode


class HumanAgent:
    """Shows each answer of the policy. Enter hands it to the environment; a text is a remark that
    the policy reads, before it answers once more.

    One episode at a time: `rollout.max_in_flight=1`. The person's time does not count.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def play(self, episode: Episode) -> None:
        """Ask, show, listen, act."""
        with episode.idle():
            await self._turn.acquire()
        try:
            messages = episode.first_messages
            while True:
                for message in messages:
                    _say(message["role"], message["content"])
                answer = await episode.ask(messages)
                _say("policy", answer["content"])
                for call in answer.get("tool_calls", []):
                    _say("call", f"{call['function']['name']}({call['function']['arguments']})")
                with episode.idle():
                    remark = (await asyncio.to_thread(_listen)).strip()
                if remark:
                    messages = [{"role": "user", "content": remark}]
                    continue
                result = await episode.act(answer)
                if result.terminated or result.truncated:
                    _say("end", f"reward {result.reward:g}")
                    return
                messages = result.info["messages"]
        finally:
            self._turn.release()


def _say(who: str, text: str) -> None:
    print(f"[{who}] {text}", file=sys.stderr, flush=True)


def _listen() -> str:
    print("[Enter: hand it over; or a remark] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()
