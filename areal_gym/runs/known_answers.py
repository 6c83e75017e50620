"""The known answers of tasks as tokens, for advantages that use their probability (`igpo`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from string import Formatter
from typing import TYPE_CHECKING

from areal_gym.config import RunConfig
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry
from areal_gym.runs.task_texts import filled_in
from areal_gym.trainer.base import ReferenceTrainer

if TYPE_CHECKING:
    from areal_gym.chat import Renderer
    from areal_gym.runs.teacher import Annotate
    from areal_gym.trainer.answer_probs import KnownAnswer
    from areal_gym.trainer.base import GroupTrainer
    from areal_gym.types import Task


def answer_annotator(
    config: RunConfig, trainer: GroupTrainer, renderer: Renderer
) -> Annotate | None:
    """Return a function that writes the probability of the known answer into turns.

    Returns None if the advantage estimator does not take `answer_probs_T`.

    Raises:
        ConfigError: the trainer cannot score at temperature 1.
    """
    from areal_gym.trainer.algorithms.advantages import needs_answer_probs

    name = config.trainer.advantage
    if not needs_answer_probs(registry().load("advantages", name)):
        return None
    from areal_gym.trainer.answer_probs import with_answer_probs
    from areal_gym.trainer.objectives.distillation import PolicyTeacher

    if not isinstance(trainer, ReferenceTrainer):
        raise ConfigError(
            f"trainer.advantage={name}: {type(trainer).__name__} cannot score at temperature 1",
            hints=["it needs the method score_at (docs/plugins.md)"],
        )
    answer_of = known_answers(config.trainer.advantage_kwargs.get("answer", "{answer}"), renderer)
    return partial(with_answer_probs, scorer=PolicyTeacher(trainer), answer_of=answer_of)


def known_answers(template: str, renderer: Renderer) -> Callable[[Task], KnownAnswer]:
    """Return a function from a task to the tokens of its known answer.

    The template's text before its first field leads to the answer and is not scored; text after
    its last field is dropped.

    Raises:
        ConfigError: the template has no field.
    """
    from areal_gym.trainer.answer_probs import KnownAnswer

    key = "trainer.advantage_kwargs.answer"
    pieces = list(Formatter().parse(template))
    fields = [i for i, (_, name, *_) in enumerate(pieces) if name is not None]
    if not fields:
        raise ConfigError(
            f"{key} = {template!r} names no field of a task's data",
            hints=["{answer}, or with words before it: The answer is {answer}"],
        )
    lead = "".join(literal for literal, *_ in pieces[: fields[0] + 1])
    rear = "".join(literal for literal, *_ in pieces[fields[-1] + 1 :])

    def answer_of(task: Task) -> KnownAnswer:
        text = filled_in(template, task, key)
        answer = text[len(lead) : len(text) - len(rear)]
        return KnownAnswer(renderer.encode(lead), renderer.encode(answer))

    return answer_of
