"""`math`: generated arithmetic and word problems, or the questions of a JSONL file; one turn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from areal_gym.envs.arithmetic import (
    LEVELS,
    canonical,
    evaluate,
    level_named,
    sample_expression,
    sample_question,
)
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.grading import agrees, extract_answer, is_same_number
from areal_gym.envs.tasks import Draft, FileTasks, GeneratedTasks, TaskSource, choose_task
from areal_gym.errors import UsageError
from areal_gym.types import Message, Task

__all__ = ["MathEnv", "math_tasks"]

SYSTEM_PROMPT = r"Solve the problem. Put the final answer in \boxed{}."

_NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun")
_THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps")

# Story and its expression. The letters a, b, c, d stand for the numbers, {n} for a name and {t}
# for a thing; every story asks for one whole number.
_STORIES: Mapping[int, Sequence[tuple[str, str]]] = {
    1: (
        ("{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?", "{a}+{b}"),
        ("One box holds {a} {t}, another holds {b}. How many {t} are there in all?", "{a}+{b}"),
        ("{n} had {sum} {t} and gave away {b}. How many {t} are left?", "{sum}-{b}"),
    ),
    2: (
        ("There are {a} shelves with {b} {t} each. How many {t} is that?", "{a}*{b}"),
        ("{n} has {a} {t} and buys {b} bags with {c} {t} each. How many {t} are there now?",
         "{a}+{b}*{c}"),
        ("{n} finds {a} {t}, then {b}, then {c}. How many {t} is that altogether?", "{a}+{b}+{c}"),
    ),
    3: (
        ("{n} packs {a} crates with {b} {t} each and {c} crates with {d} {t} each. "
         "How many {t} are packed?", "{a}*{b}+{c}*{d}"),
        ("A shop has {sum} {t}. It sells {b} on Monday and gets {c} boxes with {d} {t} each on "
         "Tuesday. How many {t} does it have then?", "{sum}-{b}+{c}*{d}"),
    ),
    4: (
        ("Each of {a} rooms has {b} tables and {c} chairs. How many pieces of furniture is that?",
         "{a}*({b}+{c})"),
        ("{n} buys {c} boxes with {sum} {t} each. In every box {b} are broken. "
         "How many good {t} is that?", "{c}*({sum}-{b})"),
    ),
    5: (
        ("{n} earns {a} coins a day for {b} days and {c} coins a day for {d} days, then shares "
         "{twice} coins equally with a friend. How many coins does {n} have in the end?",
         "{a}*{b}+{c}*{d}-{twice}/2"),
        ("In each of {a} halls there are {b} rows of {c} seats and {d} seats in the gallery. "
         "Of all seats, {twice} are taken in equal parts by two schools. How many seats are left "
         "after the first school has sat down?", "{a}*({b}*{c}+{d})-{twice}/2"),
    ),
}  # fmt: skip


def _sample_story(rng: random.Random, level: int, largest: int) -> tuple[str, str]:
    text, expression = rng.choice(_STORIES[level])
    a, b, c, d = (rng.randint(2, largest) for _ in range(4))
    values = {
        "a": a,
        "b": b,
        "c": c,
        "d": d,
        "sum": a + b,
        "twice": 2 * rng.randint(1, largest),
        "n": rng.choice(_NAMES),
        "t": rng.choice(_THINGS),
    }
    return text.format(**values), expression.format(**values)


@cache
def math_tasks(level: int) -> GeneratedTasks:
    """The generated tasks of a level: half bare expressions, half word problems."""
    settings = level_named(level)

    def make_draft(rng: random.Random) -> Draft:
        if rng.random() < 0.5:
            question, expression = _sample_story(rng, level, settings.largest)
        else:
            expression = sample_expression(rng, settings)
            question = sample_question(rng, expression)
        data = {
            "question": question,
            "expression": expression,
            "answer": str(evaluate(expression)),
        }
        return Draft(key=canonical(expression), data=data)

    return GeneratedTasks(f"math, level {level}", make_draft)


class MathEnv(TextEnv):
    r"""Mathematics in one turn.

    Task: a bare expression or a word problem, generated in five levels; or a question of a file.
    Tools: none.
    Observation: the question.
    Action: an assistant message with the answer in `\boxed{}` (or after `####`).
    Reward: 1 for the right answer, else 0. Parts: `answer`, and `format` (an answer was given).
    Episode end: terminated by the first message.
    Splits: `train` and `test`, disjoint by expression, or by the question's text for a file.
    Metrics: none.
    Data: generated; or a JSONL file of your own, under its licence. History: v0.

    Args:
        level: 1 (two numbers, + and -) to 5 (up to six numbers, parentheses, division).
        path: a `.jsonl` or `.jsonl.gz` file of questions instead of generated ones. An answer
            that holds `####` counts from there on.
        test_path: a file of held-out questions; without it a tenth of `path` is held out.
        question_field: the rows' key of the question.
        answer_field: the rows' key of the answer.

    Raises:
        DataError: a file is missing or has a broken row.
        NothingToDoError: a file has no rows.
    """

    max_turns = 1

    def __init__(
        self,
        *,
        level: int = 1,
        path: str | Path | None = None,
        test_path: str | Path | None = None,
        question_field: str = "question",
        answer_field: str = "answer",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self._is_generated = path is None
        self.suspends = not self._is_generated  # algebra is done by workers
        self._tasks: TaskSource = (
            math_tasks(level)
            if path is None
            else _file_tasks(
                Path(path), test_path and Path(test_path), question_field, answer_field
            )
        )

    def num_tasks(self, split: str) -> int | None:
        """How many questions the file has in that split; None (endless) when generated."""
        return self._tasks.num_tasks(split)

    @property
    def difficulties(self) -> Sequence[int]:
        """Levels that `reset(options={"difficulty": level})` draws from; a file has none."""
        return tuple(LEVELS) if self._is_generated else ()

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """A drawn task, or the one that `options` names; of another level if they say so.

        Raises:
            UsageError: there is no such split, index or level.
        """
        difficulty = options.get("difficulty")
        if difficulty is None:
            return choose_task(self._tasks, rng, options)
        if not self._is_generated:
            raise UsageError("questions of a file have no difficulty; a task is named by its index")
        return choose_task(math_tasks(difficulty), rng, options)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """The instruction and the question."""
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.data["question"]},
        ]

    async def respond(self, message: Message) -> Response:
        """Grade the answer."""
        answer = extract_answer(message["content"])
        # Generated answers are numbers: sympy stays out of the process that trains on them.
        is_right = answer is not None and (
            is_same_number(answer, self._gold())
            if self._is_generated
            else await agrees(answer, self._gold())
        )
        return Response(
            reward=float(is_right),
            reward_parts={"answer": float(is_right), "format": float(answer is not None)},
            is_terminated=True,
        )

    def gold_action(self) -> str:
        """The answer in a box."""
        return f"\\boxed{{{self._gold()}}}"

    def _gold(self) -> str:
        answer: str = self.task.data["answer"]
        return answer.rpartition("####")[2].strip()


@cache
def _file_tasks(
    path: Path, test_path: Path | None, question_field: str, answer_field: str
) -> FileTasks:
    # A thousand environments of one run read their file once.
    return FileTasks(
        path, test_path=test_path, question_field=question_field, answer_field=answer_field
    )
