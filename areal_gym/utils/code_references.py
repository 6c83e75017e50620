"""Import the object of a code reference: `FILE.py:NAME` or `package.module:NAME`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_gym.errors import ConfigError, did_you_mean
from areal_gym.utils.files import path_hints
from areal_gym.utils.neighbour_modules import require_own_neighbours


def is_code_reference(text: str) -> bool:
    """Return whether the text has the form `FILE.py:NAME` or `module:NAME`."""
    module, _, name = text.rpartition(":")
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    return module.endswith(".py") or all(part.isidentifier() for part in module.split("."))


def absolute_reference(reference: str) -> str:
    """Return `FILE.py:NAME` with an absolute path, and other references unchanged."""
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py"):
        return reference
    return f"{Path(file).expanduser().absolute()}:{name}"


def load_reference(reference: str, what: str = "function") -> Any:
    """Import the object of a reference; `what` is the noun for it in error messages.

    A file may import modules in its folder. A dotted name is an attribute:
    `rewards.py:Strict.score`.

    Raises:
        ConfigError: the file or module does not load, or has no such name.
    """
    module_name, _, path = reference.rpartition(":")
    if not module_name:
        hint = "write package.module:name, or file.py:name"
        raise ConfigError(f"{reference!r} names no {what}", hints=[hint])
    target: Any = load_module(module_name)
    for name in path.split("."):
        names = [key for key in dir(target) if callable(getattr(target, key, None))]
        target = getattr(target, name, None)
        if not callable(target):
            public = [key for key in names if not key.startswith("_")]
            raise ConfigError(
                f"{module_name} has no {what} {path!r}",
                hints=[
                    did_you_mean(name, names),
                    f"it has: {', '.join(public[:20])}" if public else "it defines none",
                ],
            )
    return target


def load_module(name: str) -> ModuleType:
    """Import a module by its full name, or a Python file by its path; raise ConfigError."""
    is_file = name.endswith(".py")
    try:
        return _load_file(*_version(Path(name))) if is_file else import_module(name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        hints: list[str | None] = []
        if isinstance(error, ModuleNotFoundError) and error.name != name:
            place = f", or lie beside {Path(name).name}" if is_file else ""
            hints.append(f"{error.name} must be installed in {sys.prefix}{place}")
        if isinstance(error, FileNotFoundError) and is_file and not Path(name).is_file():
            hints += path_hints(Path(name))
        message = f"cannot load {name}: {type(error).__name__}: {error}{_line(error, name)}"
        raise ConfigError(message, hints=hints) from error


def _version(path: Path) -> tuple[Path, int]:
    path = path.absolute()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    return path, path.stat().st_mtime_ns


@cache
def _load_file(path: Path, changed_ns: int) -> ModuleType:
    """Execute a file as a module; a changed file is executed again, for notebooks."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"areal_gym_file_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        require_own_neighbours(path)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _line(error: BaseException, file: str) -> str:
    """Return the line of the file that raised; messages of syntax errors have it already."""
    if isinstance(error, SyntaxError) or not file.endswith(".py"):
        return ""
    path = str(Path(file).absolute())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f" ({Path(file).name}, line {frames[-1].lineno})" if frames else ""
