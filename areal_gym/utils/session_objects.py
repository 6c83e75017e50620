"""Name objects of this Python session, because settings are text and can contain only names.

    python:exact                a function of a notebook, which only this process can find
    /home/me/rewards.py:exact   a function in a file, which other processes load

`areal_gym.train(reward=exact)` writes such a name into the run's settings. An object in a file is
named after the file, so the command line can continue the run.
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
    """Return the name of an object for settings; the object is stored until the process ends."""
    name = _file_name(thing) or _session_name(thing)
    _objects[name] = thing
    return name


def is_session_name(text: object) -> bool:
    """Return whether the text names an object that only its own session can find."""
    return isinstance(text, str) and text.startswith(PREFIX)


def with_objects(value: Any) -> Any:
    """Return settings with the objects of this session in place of their names.

    Raises:
        ConfigError: a name belongs to an object of another session.
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
    """Return a code reference to a function or class; None if other processes cannot load it."""
    module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or "<" in path:
        return None
    target: Any = sys.modules.get(module)
    file = getattr(target, "__file__", None)
    for part in path.split("."):
        target = getattr(target, part, None)
    if target is not thing or file is None:
        return None
    if "." in module:  # a module of a package, which may have relative imports
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
