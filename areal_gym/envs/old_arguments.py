"""Arguments that environments had before `tasks=`: they keep working until 1.0, and warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from areal_gym.envs.questions import KNOWN, drafts, file_tasks, hub_tasks, known_tasks
from areal_gym.errors import UsageError
from areal_gym.tasks.base import Draft, TaskSource
from areal_gym.tasks.rows import SourceRow

C = TypeVar("C", bound=type)
_QUESTIONS = (
    "path", "test_path", "dataset", "question_field", "answer_field", "skip_broken", "where"
)  # fmt: skip


def takes_old_arguments(
    names: tuple[str, ...], tasks_of: Callable[[Mapping[str, Any]], TaskSource | None]
) -> Callable[[C], C]:
    """Return a decorator of environments that turns old arguments into `tasks=`.

    The class's signature has the new ones only; `current_arguments` is for the registry, which
    compares arguments with it.
    """

    def decorate(cls: C) -> C:
        def current(arguments: Mapping[str, Any]) -> dict[str, Any]:
            given = {name: arguments[name] for name in names if name in arguments}
            kept = {name: value for name, value in arguments.items() if name not in given}
            if not given:
                return kept
            warnings.warn(
                f"{cls.__name__}: {', '.join(f'{name}=' for name in given)} give way to tasks=, "
                "which takes a file, an id of the hub or a task source; they work until 1.0",
                DeprecationWarning,
                stacklevel=3,
            )
            if kept.get("tasks") in KNOWN and "path" not in given:  # math/gsm8k where=...
                given = {"dataset": kept.pop("tasks"), **given}
            if kept.get("tasks") is not None:
                raise UsageError(
                    f"tasks and {next(iter(given))} are two sources of tasks; give one of them",
                    hints=["inside of tasks: tasks={data: FILE, test: FILE, where: {...}}"],
                )
            tasks = tasks_of(given)
            return kept if tasks is None else {**kept, "tasks": tasks}

        made: Any = cls
        initialize = made.__init__

        @wraps(initialize)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            initialize(self, *args, **current(kwargs))

        made.__init__ = __init__
        made.current_arguments = staticmethod(current)
        return cls

    return decorate


def takes_old_question_files(cls: C) -> C:
    """Decorate an environment of questions and answers: `math`, `tir`."""
    return takes_old_arguments(_QUESTIONS, _question_files)(cls)


def takes_old_files(
    make_draft: Callable[[SourceRow], Draft],
    *names: str,
    path: str = "path",
    test: str = "test_path",
) -> Callable[[C], C]:
    """Return a decorator of environments that had a file, one of held-out tasks, and `names`."""

    def tasks_of(given: Mapping[str, Any]) -> TaskSource | None:
        chosen = dict(given)
        file, test_file = chosen.pop(path, None), chosen.pop(test, None)
        if file is None:
            return None
        return file_tasks(file, test_file, make_draft, **chosen)

    return takes_old_arguments((path, test, *names), tasks_of)


def _question_files(given: Mapping[str, Any]) -> TaskSource | None:
    path, dataset = given.get("path"), given.get("dataset")
    fields = given.get("question_field"), given.get("answer_field")
    chosen: dict[str, Any] = {
        name: given[name] for name in ("skip_broken", "where") if name in given
    }
    if given.get("where") and path is None and dataset is None:
        raise UsageError("where filters the rows of a file or a data set; there is neither")
    if path is not None and dataset is not None:
        raise UsageError("path and dataset are two sources of questions; give one of them")
    if given.get("test_path") is not None and path is None:
        raise UsageError("test_path goes with path: they are the two splits")
    if path is not None:
        return file_tasks(path, given.get("test_path"), drafts(*fields), **chosen)
    if dataset is None:
        return None
    if dataset in KNOWN:
        return known_tasks(dataset, question_field=fields[0], answer_field=fields[1], **chosen)
    name, _, subset = dataset.partition(":")
    return hub_tasks(name, subset or None, drafts(*fields), **chosen)
