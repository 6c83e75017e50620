"""Relative paths in settings, made absolute before a run records them.

A run is resumed, evaluated and replayed from other directories than the one in which it started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_gym.config.run_config import RunConfig

_WITH_PATHS = {
    "env": ("kwargs", "fixed_roles"),
    "eval": ("fixed_roles",),
    "agent": ("kwargs",),
    "engine": ("model", "kwargs"),
    "data": ("file", "heldout_file"),
    "teacher": ("model",),
}
"""The settings that may hold paths, by section."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the settings with absolute paths instead of relative ones that exist here.

    A text in the arguments of plugins is a path if it has a slash or a suffix and such a file or
    directory exists; `FILE.py:NAME` names a file, too.
    """
    update = {}
    for section, keys in _WITH_PATHS.items():
        settings = getattr(config, section)
        update[section] = settings.model_copy(
            update={key: _absolute(getattr(settings, key)) for key in keys}
        )
    env = update["env"]
    update["env"] = env.model_copy(update={"id": _absolute_task_folder(env.id)})
    return config.model_copy(update=update)


def _absolute_task_folder(id: str) -> str:
    """Return an environment's id with an absolute path, if it is `harbor:PATH`."""
    adapter, _, path = id.partition(":")
    is_path = adapter == "harbor" and path and Path(path).exists()
    return f"{adapter}:{Path(path).absolute()}" if is_path else id


def beside_recipe(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe's settings: paths that do not exist here, but beside it, are made absolute.

    `settings` are what the file holds, before they are checked.
    """
    resolved = dict(settings)
    for section, keys in _WITH_PATHS.items():
        if isinstance(values := settings.get(section), dict):
            absolute = {key: _absolute(values[key], folder) for key in keys if key in values}
            resolved[section] = {**values, **absolute}
    return resolved


def _absolute(value: Any, folder: Path | None = None) -> Any:
    """Return the value with absolute paths; in `folder`, only what does not exist here."""
    if isinstance(value, dict):
        return {key: v if key == "id" else _absolute(v, folder) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_absolute(v, folder) for v in value)
    if isinstance(value, Path):
        return value.absolute() if folder is None and value.exists() else value
    if not isinstance(value, str):
        return value
    file, colon, name = value.rpartition(":")
    if not file.endswith(".py"):
        file, colon, name = value, "", ""
    path = Path(file)
    looks_like_one = "\n" not in file and len(file) < 4096 and ("/" in file or path.suffix)
    try:
        if folder is not None:
            looks_like_one = looks_like_one and not path.exists()
            path = folder / path
        exists = path.is_file() if colon else path.exists()
        return f"{path.absolute()}{colon}{name}" if looks_like_one and exists else value
    except (OSError, ValueError):  # no file's name: too long, a null byte
        return value
