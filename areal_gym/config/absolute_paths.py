"""Make relative paths in settings absolute before a run records them.

A run may be resumed, evaluated and replayed from a directory other than the one it started in.
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
"""The settings that may contain paths, by section."""


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the settings with absolute paths instead of relative ones that exist here.

    A string is treated as a path if it has a slash or a suffix and such a file or directory exists.
    In `FILE.py:NAME`, the file's path is made absolute.
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
    """Return a recipe's settings with absolute paths where they are relative to the recipe.

    Args:
        settings: the content of the recipe, before validation.
        folder: the recipe's directory. A path is looked up there if it does not exist relative to
            the current directory.
    """
    resolved = dict(settings)
    for section, keys in _WITH_PATHS.items():
        if isinstance(values := settings.get(section), dict):
            absolute = {key: _absolute(values[key], folder) for key in keys if key in values}
            resolved[section] = {**values, **absolute}
    return resolved


def _absolute(value: Any, folder: Path | None = None) -> Any:
    """Return the value with absolute paths; with `folder`, only those that exist only in it."""
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
    is_candidate = "\n" not in file and len(file) < 4096 and ("/" in file or path.suffix)
    try:
        if folder is not None:
            is_candidate = is_candidate and not path.exists()
            path = folder / path
        exists = path.is_file() if colon else path.exists()
        return f"{path.absolute()}{colon}{name}" if is_candidate and exists else value
    except (OSError, ValueError):  # not a valid file name: too long, or with a null byte
        return value
