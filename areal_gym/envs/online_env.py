"""The environment of online runs: tasks and rewards are with programs outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_gym.envs.base import Response, TextEnv
from areal_gym.types import Message, Task


class OnlineEnv(TextEnv):
    """No environment: programs outside open sessions at the gateway, ask the policy whatever they
    like, and post rewards (docs/agents.md). Its tasks are numbers.
    """

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return a name that no other has."""
        return Task(id=f"online/{rng.integers(2**48):012x}", data={})

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Something to say, for who looks whether engine and trainer are the same model."""
        return [{"role": "user", "content": "Hello."}]

    async def respond(self, message: Message) -> Response:
        """Nothing is said here, and nothing rewarded."""
        return Response(is_terminated=True)

    def gold_action(self) -> str:
        """There is nothing to solve."""
        return ""
