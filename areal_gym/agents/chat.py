"""Agents that hold a plain dialogue: the default one, and one that lets a person check answers."""

from __future__ import annotations

import asyncio
import sys

from areal_gym.agents.base import Episode
from areal_gym.types import readable


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


class HumanAgent:
    """Shows each answer of the policy: Enter hands it to the environment, a remark asks again.

    Use it with one episode at a time, `rollout.max_in_flight=1`. The person's time does not count
    against the episode's limit.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def play(self, episode: Episode) -> None:
        """Ask the policy, show its answer, read the person's input, act."""
        with episode.idle():
            await self._turn.acquire()
        try:
            messages = episode.first_messages
            while True:
                for message in messages:
                    _show(message["role"], readable(message["content"]))
                answer = await episode.ask(messages)
                _show("policy", readable(answer["content"]))
                for call in answer.get("tool_calls", []):
                    _show("call", f"{call['function']['name']}({call['function']['arguments']})")
                with episode.idle():
                    remark = (await asyncio.to_thread(_read_line)).strip()
                if remark:
                    messages = [{"role": "user", "content": remark}]
                    continue
                result = await episode.act(answer)
                if result.terminated or result.truncated:
                    _show("end", f"reward {result.reward:g}")
                    return
                messages = result.info["messages"]
        finally:
            self._turn.release()


def _show(label: str, text: str) -> None:
    print(f"[{label}] {text}", file=sys.stderr, flush=True)


def _read_line() -> str:
    print("[Enter: hand it over; or a remark] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()
