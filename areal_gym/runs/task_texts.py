"""Texts with fields of a task's data, such as "The answer is {answer}."."""

from __future__ import annotations

from collections.abc import Mapping

from areal_gym.errors import ConfigError
from areal_gym.types import Task


def filled_in(template: str, task: Task, key: str) -> str:
    """Return the template with the task's data in its fields; in a mix, those of the own task.

    Raises:
        ConfigError: the data has no such field; names `key`, the setting of the template.
    """
    data = task.data
    own = data["task"]["data"] if isinstance(data.get("task"), Mapping) else data
    try:
        return template.format(**own)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{key} = {template!r} does not fit the task {task.id}: {error!r}",
            hints=[f"its data has: {', '.join(map(str, own)) or 'nothing'}"],
        ) from error
