"""Relative paths in settings, made absolute before a run records them.

A run is resumed, evaluated and replayed from other directories than the one in which it started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_gym.config.run_config import RunConfig


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the settings with absolute paths instead of relative ones that exist here.

    A text in the arguments of plugins is a path if it has a slash or a suffix and such a file or
    directory exists; `FILE.py:NAME` names a file, too.
    """
    env, agent, engine = config.env, config.agent, config.engine
    data, teacher = config.data, config.teacher
    return config.model_copy(
        update={
            "env": env.model_copy(update={"kwargs": _absolute(env.kwargs)}),
            "agent": agent.model_copy(update={"kwargs": _absolute(agent.kwargs)}),
            "engine": engine.model_copy(
                update={"model": _absolute(engine.model), "kwargs": _absolute(engine.kwargs)}
            ),
            "data": data.model_copy(
                update={
                    "file": _absolute(data.file),
                    "heldout_file": _absolute(data.heldout_file),
                }
            ),
            "teacher": teacher.model_copy(update={"model": _absolute(teacher.model)}),
        }
    )


def _absolute(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: v if key == "id" else _absolute(v) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_absolute, value))
    if isinstance(value, Path):
        return value.absolute() if value.exists() else value
    if not isinstance(value, str):
        return value
    file, colon, name = value.rpartition(":")
    if file.endswith(".py") and Path(file).is_file():
        return f"{Path(file).absolute()}{colon}{name}"
    path = Path(value)
    looks_like_one = "\n" not in value and len(value) < 4096 and ("/" in value or path.suffix)
    try:
        return str(path.absolute()) if looks_like_one and path.exists() else value
    except (OSError, ValueError):  # no file's name: too long, a null byte
        return value
