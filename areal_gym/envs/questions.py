r"""Base classes of environments whose task is a question.

QuestionEnv     a source of tasks, levels of difficulty, an instruction and the question
AnswerEnv       the same for mathematics: an answer in `\boxed{}`, graded on the assistant's
                own text; questions are generated, or come from files and data sets
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from areal_gym.envs.arithmetic import LEVELS, Level, canonical, evaluate, level_named
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.grading import decide, extract_answer, is_same_number
from areal_gym.errors import DataError, UsageError
from areal_gym.tasks import (
    Draft,
    GeneratedTasks,
    RowTasks,
    TaskSource,
    choose_task,
    key_of_text,
)
from areal_gym.tasks.given_tasks import open_tasks, read_once
from areal_gym.tasks.opening import hub_splits, read_rows
from areal_gym.tasks.row_checks import row_filter, text_field
from areal_gym.tasks.rows import SourceRow
from areal_gym.types import Message, Task, text_of

DATA_DIR_VARIABLE = "AREAL_GYM_DATA"
"""The environment variable that names a directory of data sets (`gsm8k/test.jsonl.gz`, ...)."""


class QuestionEnv(TextEnv):
    """A question of a task source, asked after an instruction; `levels` are for curricula."""

    system_prompt: ClassVar[str] = ""
    all_levels: ClassVar[Sequence[int]] = tuple(LEVELS)

    def __init__(
        self,
        tasks: TaskSource,
        *,
        levels: Callable[[int], TaskSource] | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(tasks=tasks, render_mode=render_mode)
        self.task_source = tasks
        self._levels = levels

    @property
    def difficulties(self) -> Sequence[int]:
        """Levels that `reset(options={"difficulty": level})` draws from, for curricula."""
        return self.all_levels if self._levels is not None else ()

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return a drawn task, or the one that `options` names; of another level if they say so."""
        difficulty = options.get("difficulty")
        if difficulty is None:
            return choose_task(self.task_source, rng, options)
        if self._levels is None:
            raise UsageError("these tasks have no difficulty; a task is named by its index")
        return choose_task(self._levels(difficulty), rng, options)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the instruction and the question."""
        return [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": self.question(task)},
        ]

    def question(self, task: Task) -> str:
        """Return the question that the policy reads; by default `task.data["question"]`."""
        return str(task.data["question"])


class AnswerEnv(QuestionEnv):
    r"""A mathematical question, generated or the user's own; the answer is in `\boxed{}`."""

    system_prompt = r"Solve the problem. Put the final answer in \boxed{}."

    def __init__(
        self,
        generated: Callable[[int], TaskSource],
        level: int,
        tasks: Any,
        render_mode: str | None,
    ) -> None:
        self._is_generated = tasks is None
        super().__init__(
            generated(level) if tasks is None else question_tasks(tasks),
            levels=generated if tasks is None else None,
            render_mode=render_mode,
        )

    @property
    def gold(self) -> str:
        """The right answer."""
        answer: str = self.task.data["answer"]
        return answer.rpartition("####")[2].strip()

    async def grade(self, message: Message) -> Response:
        """Grade the assistant's text and end the episode."""
        answer, is_right = None, False
        with self.judging():
            answer = extract_answer(text_of(message["content"]))
            is_right = answer is not None and await self.is_right(answer)
        return Response(
            reward=float(is_right),
            reward_parts={"answer": float(is_right), "format": float(answer is not None)},
            is_terminated=True,
        )

    async def is_right(self, answer: str) -> bool:
        """Return whether an extracted answer is right."""
        # Generated answers are numbers: sympy stays out of the process that trains on them.
        if self._is_generated:
            return is_same_number(answer, self.gold)
        return await decide(answer, self.gold)

    def gold_action(self) -> str:
        """Return the answer in a box."""
        return f"\\boxed{{{self.gold}}}"


# ---- where questions come from -------------------------------------------------------------------


def arithmetic_tasks(
    name: str, level: int, sample: Callable[[random.Random, Level], tuple[str, str]]
) -> GeneratedTasks:
    """Return generated tasks whose data holds `question`, `expression` and `answer`, all text.

    `sample` gives a question and the expression that it asks for, at one of the `LEVELS`.
    """
    settings = level_named(level)

    def make_draft(rng: random.Random) -> Draft:
        question, expression = sample(rng, settings)
        answer = str(evaluate(expression))
        data = {"question": question, "expression": expression, "answer": answer}
        return Draft(canonical(expression), data)

    return GeneratedTasks(f"{name}, level {level}", make_draft)


@read_once
def file_tasks(
    path: str | Path,
    test_path: str | Path | None,
    make_draft: Callable[[SourceRow], Draft],
    *,
    skip_broken: bool = False,
    where: Mapping[str, Any] | None = None,
) -> RowTasks:
    """Return the tasks of a file, or of two: see `RowTasks`, `open_rows` and `row_filter`.

    A missing file or a broken row is a DataError; no rows at all are a NothingToDoError.
    """
    train = read_rows(Path(path))
    test = None if test_path is None else read_rows(Path(test_path))
    return RowTasks(
        str(path),
        train,
        make_draft,
        test=test,
        skip_broken=skip_broken,
        is_meant=row_filter(where),
    )


@read_once
def hub_tasks(
    name: str,
    subset: str | None,
    make_draft: Callable[[SourceRow], Draft],
    *,
    skip_broken: bool = False,
    where: Mapping[str, Any] | None = None,
) -> RowTasks:
    """Return the tasks of a data set on the Hugging Face hub.

    Its split "test" (or "validation") is held out, or a tenth of "train" where there is neither.
    What cannot be loaded, or has a broken row, is a DataError.
    """
    splits = hub_splits(name, subset)
    train, test = splits.get("train"), splits.get("test", splits.get("validation"))
    if train is None and test is None:
        raise DataError(f"{name} has no split train or test, but {', '.join(splits)}")
    is_meant = row_filter(where)
    return RowTasks(
        name, train or (), make_draft, test=test, skip_broken=skip_broken, is_meant=is_meant
    )


def question_tasks(given: Any) -> TaskSource:
    """Return the source of questions and answers that `tasks=` of `math` and `tir` stands for.

    A source, data, or settings: see `open_tasks`; or "gsm8k" or "math500", which are looked for in
    the directory AREAL_GYM_DATA first.
    """
    settings = given if isinstance(given, Mapping) else {"data": given}
    name = settings.get("data")
    if not isinstance(name, str) or name not in KNOWN:
        return open_tasks(given, answer_draft)
    for setting in settings:
        if setting not in ("data", "where"):
            raise UsageError(f"tasks has {setting!r}, which does not go with {name}")
    return known_tasks(name, where=settings.get("where"))


def known_tasks(
    name: str,
    *,
    question_field: str | None = None,
    answer_field: str | None = None,
    skip_broken: bool = False,
    where: Mapping[str, Any] | None = None,
) -> RowTasks:
    """Return the tasks of a public data set of `KNOWN`."""
    known = KNOWN[name]
    make_draft = drafts(question_field or known.question, answer_field)
    data_dir = os.environ.get(DATA_DIR_VARIABLE)
    if data_dir is not None:
        train, test = (_find(Path(data_dir), stem) for stem in (known.train, known.test))
        # Public files are as they are: `data show` says how many of their rows are left out.
        return file_tasks(train, test, make_draft, skip_broken=True, where=where)
    try:
        return hub_tasks(known.hub, known.subset, make_draft, skip_broken=skip_broken, where=where)
    except DataError as error:
        local = f"or a directory that holds {known.train}.jsonl and {known.test}.jsonl"
        hints = [*error.hints, f"{local}: export {DATA_DIR_VARIABLE}=DIR"]
        raise DataError(error.message, hints=hints) from error


class _Known(NamedTuple):
    """A public data set: its name on the hub, and its files below the data directory."""

    hub: str
    subset: str | None
    question: str
    train: str
    test: str


KNOWN = {
    "gsm8k": _Known("openai/gsm8k", "main", "question", "gsm8k/train", "gsm8k/test"),
    "math500": _Known(
        "nlile/hendrycks-MATH-benchmark", None, "problem", "math_train/train", "math500/test"
    ),
}


def _find(directory: Path, stem: str) -> Path:
    suffixes = (".jsonl", ".jsonl.gz", ".parquet")
    candidates = [directory / f"{stem}{suffix}" for suffix in suffixes]
    for file in candidates:
        if file.is_file():
            return file
    raise DataError(
        f"{DATA_DIR_VARIABLE}={directory} has no {stem}.jsonl",
        hints=[
            f"looked for: {', '.join(map(str, candidates))}",
            f"without {DATA_DIR_VARIABLE}, it is loaded from the Hugging Face hub",
        ],
    )


@cache
def drafts(question_field: str | None, answer_field: str | None) -> Callable[[SourceRow], Draft]:
    """Return a function that makes a task of a row with a question and an answer."""
    question_field, answer_field = question_field or "question", answer_field or "answer"

    def make_draft(row: SourceRow) -> Draft:
        question = text_field(row, question_field)
        data = {"question": question, "answer": text_field(row, answer_field)}
        return Draft(key_of_text(question), data)

    return make_draft


answer_draft = drafts(None, None)
