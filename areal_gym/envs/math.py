"""`math`: generated arithmetic and word problems, or questions of files and data sets."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from areal_gym.envs.arithmetic import Level, sample_expression, sample_question
from areal_gym.envs.base import Response
from areal_gym.envs.old_arguments import takes_old_question_files
from areal_gym.envs.questions import AnswerEnv, arithmetic_tasks
from areal_gym.errors import UsageError
from areal_gym.tasks import GeneratedTasks
from areal_gym.types import Message

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
    values: dict[str, Any] = {"a": a, "b": b, "c": c, "d": d, "sum": a + b}
    values["twice"] = 2 * rng.randint(1, largest)
    values |= {"n": rng.choice(_NAMES), "t": rng.choice(_THINGS)}
    return text.format(**values), expression.format(**values)


@cache
def math_tasks(level: int) -> GeneratedTasks:
    """Return the generated tasks of a level: half bare expressions, half word problems."""

    def sample(rng: random.Random, settings: Level) -> tuple[str, str]:
        if rng.random() < 0.5:
            return _sample_story(rng, level, settings.largest)
        expression = sample_expression(rng, settings)
        return sample_question(rng, expression), expression

    return arithmetic_tasks("math", level, sample)


@takes_old_question_files
class MathEnv(AnswerEnv):
    r"""Mathematics in one turn, or in several with feedback.

    Task: a bare expression or a word problem, generated in five levels; or a question of a file
        or a data set.
    Tools: none.
    Observation: the question; with several turns, then what was wrong with the last answer.
    Action: an assistant message with the answer in `\boxed{}` (or after `####`, or after "the
        answer is").
    Reward: 1 for the right answer, `discount ** n` after n wrong ones, else 0. Parts: `answer`,
        and `format` (an answer was given).
    Episode end: terminated by the right answer, or by the only one; truncated after `max_turns`.
    Splits: `train` and `test`, disjoint by expression, or by the question's text.
    Metrics: `attempts`, with several turns.
    Data: generated; or yours, or a public one under its licence (`math/gsm8k`: MIT; `math/math500`:
        MIT). History: v0.

    Args:
        level: 1 (two numbers, + and -) to 5 (up to six numbers, parentheses, division).
        tasks: your own questions instead of generated ones: a file (.jsonl, .csv, .parquet, ...),
            a data set of the Hugging Face hub (`NAME`, `NAME:SUBSET`), a list of dicts, a task
            source; or settings, {"data": FILE, "test": FILE, "fields": {"question": "problem"},
            "where": {"level": {"max": 3}}, "skip_broken": true} (docs/data.md). "gsm8k" and
            "math500" are looked for in the directory AREAL_GYM_DATA first. Rows have a `question`
            and an `answer`; one that holds `####` counts from there on.
        max_turns: how many answers may be given.
        discount: what each wrong answer leaves of the reward.

    Raises:
        DataError: a file is missing or has a broken row, or a data set cannot be had.
        NothingToDoError: a file has no rows.
    """

    def __init__(
        self,
        *,
        level: int = 1,
        tasks: Any = None,
        max_turns: int = 1,
        discount: float = 0.5,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            math_tasks,
            level,
            tasks,
            render_mode,
        )
        self.suspends = not self._is_generated  # algebra is done by workers
        if max_turns < 1 or not 0 <= discount <= 1:
            raise UsageError(
                f"max_turns = {max_turns!r}, discount = {discount!r}: at least one turn, and a "
                "discount of 0 to 1"
            )
        self.max_turns = max_turns
        self._discount = discount

    async def respond(self, message: Message) -> Response:
        """Grade the answer; say what is wrong with it while there is another turn."""
        graded = await self.grade(message)
        if self.max_turns == 1:
            return graded
        attempts = {"attempts": 1}
        if graded.reward:
            discount = self._discount ** (self.num_turns - 1)
            return replace(graded, reward=discount * graded.reward, metrics=attempts)
        if self.num_turns == self.max_turns:
            return replace(graded, is_terminated=False, metrics=attempts)
        text = _WRONG if graded.reward_parts["format"] else _UNANSWERED
        return Response(messages=[{"role": "user", "content": text}], metrics=attempts)


_WRONG = r"That is not right. Look for the mistake and put the final answer in \boxed{}."
_UNANSWERED = r"There is no answer in this. Put the final answer in \boxed{}."
