"""Fills texts such as "The answer is {answer}." with fields of a task's data."""

from __future__ import annotations

from collections.abc import Mapping

from areal_gym.errors import ConfigError
from areal_gym.types import Task


def filled_in(template: str, task: Task, key: str) -> str:
    """Return the template with fields of the task's data; in a mix, of the mixed task's data.

    Raises:
        ConfigError: the data has no such field; the message names `key`, the template's setting.
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
