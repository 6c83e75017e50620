r"""Base classes of environments whose task is a question.

QuestionEnv     a source of tasks, levels of difficulty, an instruction and the question
AnswerEnv       the same for mathematics: an answer in `\boxed{}`, graded on the assistant's
                own text; questions are generated, or come from files and data sets
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from areal_gym.envs.arithmetic import LEVELS
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.data_files import SourceRow, read_file, read_hub, row_filter, text_field
from areal_gym.envs.grading import decide, extract_answer, is_same_number
from areal_gym.envs.tasks import Draft, RowTasks, TaskSource, choose_task, key_of_text
from areal_gym.errors import DataError, UsageError
from areal_gym.types import Message, Task

DATA_DIR_VARIABLE = "AREAL_GYM_DATA"
"""The environment variable that names a directory of data sets (`gsm8k/test.jsonl.gz`, ...)."""


class QuestionEnv(TextEnv):
    """A question of a task source, asked after an instruction.

    Args:
        tasks: where questions come from; `task.data["question"]` is asked.
        levels: the tasks of each level of difficulty, where there are levels.
        render_mode: Gymnasium's.
    """

    system_prompt: ClassVar[str] = ""

    def __init__(
        self,
        tasks: TaskSource,
        *,
        levels: Callable[[int], TaskSource] | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.task_source = tasks
        self._levels = levels

    def num_tasks(self, split: str) -> int | None:
        """Return the number of tasks in the split; None (endless) when they are generated."""
        return self.task_source.num_tasks(split)

    @property
    def difficulties(self) -> Sequence[int]:
        """Levels that `reset(options={"difficulty": level})` draws from, for curricula."""
        return tuple(LEVELS) if self._levels is not None else ()

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return a drawn task, or the one that `options` names; of another level if they say so.

        Raises:
            UsageError: there is no such split, index or level.
        """
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
            {"role": "user", "content": task.data["question"]},
        ]


class AnswerEnv(QuestionEnv):
    r"""A mathematical question. The arguments are those of `math`."""

    system_prompt = r"Solve the problem. Put the final answer in \boxed{}."

    def __init__(
        self,
        generated: Callable[[int], TaskSource],
        *,
        level: int,
        path: str | Path | None,
        test_path: str | Path | None,
        dataset: str | None,
        question_field: str | None,
        answer_field: str | None,
        skip_broken: bool,
        where: Mapping[str, Any] | None,
        render_mode: str | None,
    ) -> None:
        if where and path is None and dataset is None:
            raise UsageError("where filters the rows of a file or a data set; there is neither")
        if path is not None and dataset is not None:
            raise UsageError("path and dataset are two sources of questions; give one of them")
        if test_path is not None and path is None:
            raise UsageError("test_path goes with path: they are the two splits")
        self._is_generated = path is None and dataset is None
        chosen = _Chosen(question_field, answer_field, skip_broken, json.dumps(where or {}))
        tasks: TaskSource
        if dataset is not None:
            tasks = _dataset_tasks(dataset, chosen, os.environ.get(DATA_DIR_VARIABLE))
        elif path is not None:
            tasks = _question_file(Path(path), test_path and Path(test_path), chosen)
        else:
            tasks = generated(level)
        super().__init__(
            tasks, levels=generated if self._is_generated else None, render_mode=render_mode
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
            answer = extract_answer(message["content"])
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


def file_tasks(
    path: Path,
    test_path: Path | None,
    make_draft: Callable[[SourceRow], Draft],
    *,
    skip_broken: bool = False,
    where: Mapping[str, Any] | None = None,
) -> RowTasks:
    """Return the tasks of a file, or of two: see `RowTasks`; `where` filters rows (see
    `row_filter`).

    Raises:
        DataError: a file is missing or has a broken row.
        NothingToDoError: there are no rows.
    """
    rows = read_file(path)
    test = None if test_path is None else read_file(test_path)
    try:
        return RowTasks(
            str(path),
            rows,
            make_draft,
            test=test,
            skip_broken=skip_broken,
            is_meant=row_filter(where),
        )
    finally:
        for opened in (rows, test):  # a broken row leaves its file open
            if isinstance(opened, Generator):
                opened.close()


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

    Raises:
        DataError: it cannot be loaded, or has a broken row.
    """
    splits = read_hub(name, subset)
    test = splits.get("test", splits.get("validation"))
    if "train" not in splits and test is None:
        raise DataError(f"{name} has no split train or test, but {', '.join(splits)}")
    return RowTasks(
        name,
        splits.get("train", iter(())),
        make_draft,
        test=test,
        skip_broken=skip_broken,
        is_meant=row_filter(where),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """A public data set, and its place in a data directory."""

    hub: str
    subset: str | None = None
    question: str
    answer: str = "answer"
    train: str
    """Files below the data directory, without their suffixes."""
    test: str


_KNOWN = {
    "gsm8k": _Known(
        hub="openai/gsm8k",
        subset="main",
        question="question",
        train="gsm8k/train",
        test="gsm8k/test",
    ),
    "math500": _Known(
        hub="nlile/hendrycks-MATH-benchmark",
        question="problem",
        train="math_train/train",
        test="math500/test",
    ),
}
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


class _Chosen(NamedTuple):
    """Selected rows and fields; hashable."""

    question_field: str | None
    answer_field: str | None
    skip_broken: bool
    where: str
    """JSON."""

    def rows(self) -> dict[str, Any]:
        """Return the selection as arguments of `file_tasks` and `hub_tasks`."""
        return {"skip_broken": self.skip_broken, "where": json.loads(self.where)}


@cache  # a thousand environments of one run read their data once
def _question_file(path: Path, test_path: Path | None, chosen: _Chosen) -> RowTasks:
    make_draft = _drafts(chosen.question_field, chosen.answer_field)
    return file_tasks(path, test_path, make_draft, **chosen.rows())


@cache
def _dataset_tasks(dataset: str, chosen: _Chosen, data_dir: str | None) -> RowTasks:
    """Load `gsm8k` and `math500` from the data directory or the hub, others from the hub.

    Other data sets are `NAME` or `NAME:SUBSET`.
    """
    known = _KNOWN.get(dataset)
    if known is None:
        name, _, subset = dataset.partition(":")
        make_draft = _drafts(chosen.question_field, chosen.answer_field)
        return hub_tasks(name, subset or None, make_draft, **chosen.rows())
    make_draft = _drafts(
        chosen.question_field or known.question, chosen.answer_field or known.answer
    )
    if data_dir is None:
        try:
            return hub_tasks(known.hub, known.subset, make_draft, **chosen.rows())
        except DataError as error:
            local = f"or a directory that holds {known.train}.jsonl and {known.test}.jsonl"
            hints = [*error.hints, f"{local}: export {DATA_DIR_VARIABLE}=DIR"]
            raise DataError(error.message, hints=hints) from error
    train, test = (_find(Path(data_dir), stem) for stem in (known.train, known.test))
    # Public files are as they are: `data show` says how many of their rows are left out.
    return file_tasks(train, test, make_draft, **{**chosen.rows(), "skip_broken": True})


def _find(directory: Path, stem: str) -> Path:
    candidates = [directory / f"{stem}{suffix}" for suffix in _SUFFIXES]
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


def _drafts(question_field: str | None, answer_field: str | None) -> Callable[[SourceRow], Draft]:
    question_field, answer_field = question_field or "question", answer_field or "answer"

    def make_draft(row: SourceRow) -> Draft:
        question = text_field(row, question_field)
        data = {"question": question, "answer": text_field(row, answer_field)}
        return Draft(key_of_text(question), data)

    return make_draft
