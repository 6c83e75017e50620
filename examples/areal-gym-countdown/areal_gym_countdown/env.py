"""`countdown/numbers`: reach a target with three numbers, in three tries."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_gym import Message, Response, Task, TextEnv
from areal_gym.envs.arithmetic import evaluate
from areal_gym.tasks import Draft, GeneratedTasks, choose_task

__all__ = ["NumbersEnv"]


def _draft(rng: random.Random) -> Draft:
    a, b, c = (rng.randint(1, 12) for _ in range(3))
    solution = f"{a}*{b}{rng.choice('+-')}{c}"
    data = {"numbers": sorted((a, b, c)), "target": int(evaluate(solution)), "solution": solution}
    return Draft(f"{data['numbers']} -> {data['target']}", data)


_TASKS = GeneratedTasks("countdown/numbers", _draft)


class NumbersEnv(TextEnv):
    """Reach a target with three numbers, each used once.

    Task: "Make 17 from 3, 4 and 5."; always solvable.
    Tools: none.
    Observation: the task, then what is wrong with the last try.
    Action: an assistant message that is the expression, such as 3*4+5.
    Reward: 1 in the first try, 0.5 in a later one, else 0.
    Episode end: terminated when solved; truncated after `max_turns`.
    Splits: `train` and `test`, endless, disjoint by numbers and target.
    """

    max_turns = 3

    def num_tasks(self, split: str) -> int | None:
        """Endless."""
        return _TASKS.num_tasks(split)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """A drawn task, or the one that `options` names."""
        return choose_task(_TASKS, rng, options)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """The task in one sentence."""
        a, b, c = task.data["numbers"]
        return [{"role": "user", "content": f"Make {task.data['target']} from {a}, {b} and {c}."}]

    async def respond(self, message: Message) -> Response:
        """Grade the expression, or say what is wrong with it."""
        mistake = self._mistake(message["content"].strip())
        if mistake is None:
            reward = 1.0 if self.num_turns == 1 else 0.5
            return Response(reward=reward, reward_parts={"solved": reward}, is_terminated=True)
        return Response(messages=[{"role": "user", "content": f"{mistake} Try again."}])

    def gold_action(self) -> str:
        """The expression that the task was made from."""
        return str(self.task.data["solution"])

    def _mistake(self, expression: str) -> str | None:
        try:
            value = evaluate(expression)
        except ValueError:
            return "This is no arithmetic."
        used = sorted(int(digits) for digits in re.findall(r"\d{1,9}", expression))
        if used != list(self.task.data["numbers"]):
            return "Use each number once."
        return None if value == self.task.data["target"] else f"This is {value}."
