"""The environment of online runs: programs outside bring the tasks and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_gym.envs.base import Response, TextEnv
from areal_gym.types import Message, Task


class OnlineEnv(TextEnv):
    """A placeholder: programs outside open sessions at the gateway, ask the policy, and post
    rewards.

    See docs/agents.md. Its tasks are numbers.
    """

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return a task with a unique id."""
        return Task(id=f"online/{rng.integers(2**48):012x}", data={})

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return a prompt for the check that engine and trainer are the same model."""
        return [{"role": "user", "content": "Hello."}]

    async def respond(self, message: Message) -> Response:
        """End the episode without a reward."""
        return Response(is_terminated=True)

    def gold_action(self) -> str:
        """Return an empty text: there is nothing to solve."""
        return ""
