"""Objects of this Python session under names, so that settings, which are text, can name them.

    python:exact             a function of a notebook: only this process can find it
    /home/me/rewards.py:exact   a function of a file: others load it from there

`areal_gym.train(reward=exact)` writes such a name into the run's settings. What lies in a file is
named by the file, so that the command line can go on with the run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_gym.errors import ConfigError

PREFIX = "python:"
_objects: dict[str, Any] = {}


def name_of(thing: Any) -> str:
    """Return the name of an object in settings; the object is kept until the process ends."""
    name = _file_name(thing) or _session_name(thing)
    _objects[name] = thing
    return name


def is_session_name(text: object) -> bool:
    """Return whether the text names an object that only the session that made it can find."""
    return isinstance(text, str) and text.startswith(PREFIX)


def with_objects(value: Any) -> Any:
    """Return settings with the objects of this session in place of their names.

    Raises:
        ConfigError: a name is that of another session's object.
    """
    if isinstance(value, str):
        if value in _objects:
            return _objects[value]
        if is_session_name(value):
            raise ConfigError(
                f"{value.removeprefix(PREFIX)!r} was defined in a Python session, without a file, "
                "and only that session has it",
                hints=[
                    "save it in a file and name that: FILE.py:NAME",
                    "or give it again from Python, such as areal_gym.train(mode='resume', out=..., "
                    "reward=...)",
                ],
            )
        return value
    if isinstance(value, Mapping):
        return {key: with_objects(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_objects(item) for item in value]
    return value


def _file_name(thing: Any) -> str | None:
    """Return where other processes find a function or class; None if they do not."""
    module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or "<" in path:
        return None
    target: Any = sys.modules.get(module)
    file = getattr(target, "__file__", None)
    for part in path.split("."):
        target = getattr(target, part, None)
    if target is not thing or file is None:
        return None
    if "." in module:  # of a package, which imports with relative names
        return f"{module}:{path}"
    return f"{Path(file).absolute()}:{path}" if file.endswith(".py") else None


def _session_name(thing: Any) -> str:
    name = getattr(thing, "__name__", None) or type(thing).__name__
    if not str(name).isidentifier():
        name = "function" if callable(thing) else "object"
    unused, number = f"{PREFIX}{name}", 1
    while unused in _objects and _objects[unused] is not thing:
        number += 1
        unused = f"{PREFIX}{name}_{number}"
    return unused
