r"""`choice`: multiple-choice questions, generated or of a file."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from functools import cache
from typing import Any

from areal_gym.envs.arithmetic import Level, sample_expression, sample_question
from areal_gym.envs.base import Response
from areal_gym.envs.grading import extract_answer
from areal_gym.envs.questions import QuestionEnv, arithmetic_tasks
from areal_gym.errors import DataError
from areal_gym.tasks import Draft, GeneratedTasks, SourceRow, key_of_text
from areal_gym.tasks.given_tasks import open_tasks
from areal_gym.tasks.row_checks import text_field
from areal_gym.types import Message, Task, text_of

LETTERS = "ABCDEFGHIJ"
_LETTER = re.compile(r"(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?[\s(*$]*([A-J])(?![A-Za-z'’])")
_INCORRECT = re.compile(r"incorrect answer ?(\d+)", re.IGNORECASE)


@cache
def choice_tasks(level: int) -> GeneratedTasks:
    """Return generated tasks of a level: arithmetic with four numbers to choose from."""

    def sample(rng: random.Random, settings: Level) -> tuple[str, str]:
        expression = sample_expression(rng, settings)
        return sample_question(rng, expression), expression

    return arithmetic_tasks("choice", level, sample)


class ChoiceEnv(QuestionEnv):
    r"""Multiple-choice questions; the answer is a letter.

    Task: an arithmetic question with four numbers, generated in five levels; or rows of a file:
        with `question`, `choices` (a list of texts) and `answer` (a letter, the choice's text, or
        its place from 0); or with the columns of GPQA (`Question`, `Correct Answer`, `Incorrect
        Answer 1`, ...). The order of the choices depends on the question and `order_seed` only.
    Tools: none.
    Observation: the question and its lettered choices.
    Action: an assistant message that ends in "Answer: LETTER", or with the letter in `\boxed{}`.
    Reward: 1 for the right letter, else 0. Parts: `answer`, and `format` (a letter was given).
    Episode end: terminated by the first message.
    Splits: `train` and `test`, disjoint by question.
    Metrics: none.
    Data: generated; or yours. History: v0.

    Args:
        level: 1 (two numbers, + and -) to 5 (up to six numbers, parentheses, division).
        tasks: questions of your own instead of generated ones: a file, a data set of the hub, a
            list, settings such as {"data": FILE, "test": FILE, "skip_broken": true}, or a task
            source.
        order_seed: of the order of the choices; -1 leaves those of a file as they are.

    Raises:
        DataError: a file is missing or has a broken row.
    """

    system_prompt = (
        "Answer the multiple-choice question. Think step by step. The last line of your answer is: "
        "Answer: LETTER"
    )

    def __init__(
        self,
        *,
        level: int = 1,
        tasks: Any = None,
        order_seed: int = 0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            choice_tasks(level) if tasks is None else open_tasks(tasks, choice_draft),
            levels=choice_tasks if tasks is None else None,
            render_mode=render_mode,
        )
        self._order_seed = order_seed

    def question(self, task: Task) -> str:
        """Return the question and its choices, a line each."""
        lines = [f"{LETTERS[i]}) {text}" for i, text in enumerate(self._choices(task)[0])]
        return f"{task.data['question']}\n\n" + "\n".join(lines)

    async def respond(self, message: Message) -> Response:
        """Compare the letter and end the episode."""
        letter = None
        with self.judging():
            letter = chosen_letter(text_of(message["content"]))
        is_right = letter == self._choices(self.task)[1]
        return Response(
            reward=float(is_right),
            reward_parts={"answer": float(is_right), "format": float(letter is not None)},
            is_terminated=True,
        )

    def gold_action(self) -> str:
        """Return the line with the right letter."""
        return f"Answer: {self._choices(self.task)[1]}"

    def _choices(self, task: Task) -> tuple[list[str], str]:
        """Return the choices in their order, and the letter of the right one."""
        right = str(task.data["answer"])
        if "choices" in task.data:
            choices = list(task.data["choices"])
        else:
            choices = _numbers_around(Fraction(right), random.Random(f"{task.id} numbers"))
        if self._order_seed >= 0:
            random.Random(f"{task.id} {self._order_seed}").shuffle(choices)
        return choices, LETTERS[choices.index(right)]


def _numbers_around(right: Fraction, rng: random.Random) -> list[str]:
    offsets = [0, *rng.sample([n for n in range(-10, 11) if n], 3)]
    return [str(right + offset) for offset in offsets]


def chosen_letter(text: str) -> str | None:
    """Return the letter that a text gives as its answer; None when it gives none."""
    answer = extract_answer(text)
    match = None if answer is None else _LETTER.match(answer)
    return None if match is None else match[1]


def choice_draft(row: SourceRow) -> Draft:
    """Make a task of a row; a row that has no question, choices or answer is a DataError."""
    is_gpqa = "Correct Answer" in row.data
    question = text_field(row, "Question" if is_gpqa else "question")
    if is_gpqa:
        answer = text_field(row, "Correct Answer").strip()
        wrong = [name for name in row.data if _INCORRECT.fullmatch(name)]
        choices = [answer, *(text_field(row, name).strip() for name in sorted(wrong))]
    else:
        choices, answer = _given(row)
    if not 2 <= len(choices) <= len(LETTERS) or choices.count(answer) != 1:
        raise DataError(
            f"{row.where}: {len(choices)} choices, of which {choices.count(answer)} are the answer",
            hints=[f"2 to {len(LETTERS)} choices, one of which is the answer"],
        )
    return Draft(
        key_of_text(question), {"question": question, "choices": choices, "answer": answer}
    )


def _given(row: SourceRow) -> tuple[list[str], str]:
    choices: Any = row.data.get("choices")
    if isinstance(choices, dict):  # of the hub: {"label": [...], "text": [...]}
        choices = choices.get("text")
    if not isinstance(choices, list) or not all(isinstance(c, str | int | float) for c in choices):
        raise DataError(f"{row.where}: choices = {choices!r}; a list of texts is needed")
    texts = [str(choice).strip() for choice in choices]
    answer = text_field(row, "answer").strip()
    if answer not in texts:
        place = LETTERS.find(answer) if len(answer) == 1 and answer.isalpha() else -1
        place = int(answer) if answer.isdecimal() else place
        answer = texts[place] if 0 <= place < len(texts) else answer
    return texts, answer
