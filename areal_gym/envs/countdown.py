"""`countdown`: reach a target with given numbers."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from areal_gym.envs.arithmetic import evaluate
from areal_gym.envs.base import Response
from areal_gym.envs.grading import extract_answer
from areal_gym.envs.old_arguments import takes_old_files
from areal_gym.envs.questions import QuestionEnv
from areal_gym.errors import DataError, UsageError
from areal_gym.tasks import Draft, GeneratedTasks
from areal_gym.tasks.given_tasks import open_tasks
from areal_gym.tasks.rows import SourceRow
from areal_gym.types import Message, Task, text_of

__all__ = ["CountdownEnv", "countdown_tasks", "uses_exactly"]

FORMAT_REWARD = 0.1
"""Reward for an answer that is arithmetic, but wrong."""

_LARGEST = 99
_TARGETS = range(10, 100)
_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
_SPELLINGS = {"×": "*", "÷": "/", "−": "-", "\\times": "*", "\\cdot": "*", "\\div": "/"}


@cache
def countdown_tasks(num_numbers: int) -> GeneratedTasks:
    """Return solvable tasks; `task.data` holds `numbers`, `target` and one `solution`."""

    def make_draft(rng: random.Random) -> Draft:
        while True:
            numbers = [rng.randint(1, _LARGEST) for _ in range(num_numbers)]
            solution, value = _sample_solution(rng, numbers)
            if value in _TARGETS and value not in numbers:
                break
        rng.shuffle(numbers)
        key = f"{sorted(numbers)} -> {value}"
        return Draft(key, {"numbers": numbers, "target": value, "solution": solution})

    return GeneratedTasks(f"countdown of {num_numbers}", make_draft)


def _sample_solution(rng: random.Random, numbers: Sequence[int]) -> tuple[str, int]:
    """Return a random expression over all the numbers, and its value."""
    parts = [(str(number), number) for number in numbers]
    while len(parts) > 1:
        rng.shuffle(parts)
        (left, a), (right, b) = parts.pop(), parts.pop()
        symbols = ["+", "-", "*"]
        if b != 0 and a % b == 0:
            symbols.append("/")
        symbol = rng.choice(symbols)
        parts.append((f"({left}{symbol}{right})", _OPERATORS[symbol](a, b)))
    text, value = parts[0]
    return text[1:-1], value


def uses_exactly(expression: str, numbers: Sequence[int]) -> bool:
    """Return whether the expression holds each of the numbers once and no other."""
    used = [int(digits) for digits in re.findall(r"\d{1,9}", expression)]
    return sorted(used) == sorted(numbers)


def countdown_draft(row: SourceRow) -> Draft:
    numbers = row.data.get("nums", row.data.get("numbers"))
    target, solution = row.data.get("target"), row.data.get("solution")
    if (
        not isinstance(numbers, list)
        or not numbers
        or not all(_is_natural(number) for number in [*numbers, target])
        or not isinstance(solution, str | None)
    ):
        raise DataError(
            f"{row.where}: nums = {numbers!r}, target = {target!r}, solution = {solution!r}; "
            "a list of whole numbers, a whole number and a text are needed"
        )
    data = {"numbers": numbers, "target": target, "solution": solution}
    return Draft(f"{sorted(numbers)} -> {target}", data)


@takes_old_files(countdown_draft, "skip_broken")
class CountdownEnv(QuestionEnv):
    r"""Reach a target with given numbers.

    Task: "Use each of 75, 85 and 71 once with + - * / to make 81."; always solvable when generated.
    Tools: none.
    Observation: the question.
    Action: an assistant message with the expression in `\boxed{}`.
    Reward: 1 for an expression that uses each number exactly once and has the target as its exact
        value; 0.1 for another arithmetic expression; else 0. Parts: `answer`, `format`.
    Episode end: terminated by the first message.
    Splits: `train` and `test`, disjoint by numbers and target (in any order).
    Metrics: none.
    Data: generated; or a file. History: v0.

    Args:
        num_numbers: how many numbers there are, 3 to 6.
        tasks: tasks of your own instead: a file, a data set of the hub, a list, settings such as
            {"data": FILE, "test": FILE, "skip_broken": true}, or a task source. Rows have `nums`
            (or `numbers`), a `target`, and maybe a `solution`, which the gold policy then knows.

    Raises:
        DataError: a file is missing or has a broken row.
    """

    system_prompt = r"Put the final expression in \boxed{}."
    max_turns = 1
    judges_all_output = True

    def __init__(
        self,
        *,
        num_numbers: int = 4,
        tasks: Any = None,
        render_mode: str | None = None,
    ) -> None:
        if num_numbers not in range(3, 7):
            raise UsageError(f"num_numbers = {num_numbers!r}: it is 3 to 6")
        super().__init__(
            countdown_tasks(num_numbers) if tasks is None else open_tasks(tasks, countdown_draft),
            render_mode=render_mode,
        )

    def question(self, task: Task) -> str:
        """Return the rules and the numbers."""
        *others, last = map(str, task.data["numbers"])
        numbers = f"{', '.join(others)} and {last}"
        return f"Use each of {numbers} once with + - * / to make {task.data['target']}."

    async def respond(self, message: Message) -> Response:
        """Grade the expression."""
        expression = _as_arithmetic(extract_answer(text_of(message["content"])) or "")
        try:
            value = evaluate(expression)
        except ValueError:
            value = None
        is_right = value == self.task.data["target"] and uses_exactly(
            expression, self.task.data["numbers"]
        )
        format_reward = FORMAT_REWARD if value is not None else 0.0
        return Response(
            reward=1.0 if is_right else format_reward,
            reward_parts={"answer": float(is_right), "format": format_reward},
            is_terminated=True,
        )

    def gold_action(self) -> str:
        """Return the expression that the task was made from, if it is known."""
        solution = self.task.data.get("solution")
        return self.noop_action() if solution is None else f"\\boxed{{{solution}}}"


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _as_arithmetic(answer: str) -> str:
    """Return the answer with plain operators, and without "= 81" at its end."""
    for spelling, symbol in _SPELLINGS.items():
        answer = answer.replace(spelling, symbol)
    return answer.partition("=")[0].strip().strip("$").strip()
