"""Modules that a user's file imports from its own folder: `rewards.py` imports `helpers.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from areal_gym.errors import ConfigError


def neighbours(file: Path) -> list[Path]:
    """Return the files in the folder, or below it, that the file imports, and that those import.

    They are found by reading the code, so imports inside functions count and nothing is executed;
    names that are only made at run time are not found. Installed packages do not count.
    """
    folder = file.absolute().parent
    waiting, files = [file.absolute()], {file.absolute(): None}
    while waiting:
        for path in _imported_files(waiting.pop(), folder):
            if path not in files:
                files[path] = None
                waiting.append(path)
    return list(files)[1:]


def require_own_neighbours(file: Path) -> None:
    """Raise ConfigError if a module beside the loaded file was not what its `import` got.

    Python keeps one module of a name: two folders with a `helpers.py` each cannot both be used.
    """
    folder = file.absolute().parent
    for name in {name.partition(".")[0] for name in _imported_names(file)}:
        spec = PathFinder.find_spec(name, [str(folder)])
        other = getattr(sys.modules.get(name), "__file__", None)
        if spec is None or spec.origin is None or other is None or name in sys.stdlib_module_names:
            continue
        own, got = Path(spec.origin), Path(other)
        if got.is_file() and not got.samefile(own) and got.read_bytes() != own.read_bytes():
            raise ConfigError(
                f"{file} imports {name}, and Python has another module of that name: {got}",
                hints=[f"rename {own}"],
            )


def _imported_files(file: Path, folder: Path) -> Iterator[Path]:
    for name in _imported_names(file, folder):
        if _is_installed(name.partition(".")[0], folder):
            continue
        places: Sequence[str] | None = [str(folder)]
        full = ""
        for part in name.split("."):
            full = f"{full}.{part}" if full else part
            spec = None if places is None else PathFinder.find_spec(full, places)
            if spec is None:
                break
            if (path := _source(spec)) is not None:
                yield path
            places = spec.submodule_search_locations and list(spec.submodule_search_locations)


def _imported_names(file: Path, folder: Path | None = None) -> Iterator[str]:
    """Yield the names that the code imports: of `from a import b`, both `a` and `a.b`."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, file, folder)
            if base is not None:
                yield from (f"{base}.{alias.name}".strip(".") for alias in node.names)


def _base(node: ast.ImportFrom, file: Path, folder: Path | None) -> str | None:
    """Return what `from ... import` starts at; None if it leaves the folder."""
    if not node.level:
        return node.module
    if folder is None or len(parts := file.parent.relative_to(folder).parts) < node.level - 1:
        return None
    package = parts[: len(parts) - node.level + 1]
    return ".".join([*package, *(node.module or "").split(".")]).strip(".")


def _is_installed(name: str, folder: Path) -> bool:
    if name == "areal_gym" or name in sys.stdlib_module_names:
        return True
    elsewhere = [path for path in sys.path if Path(path or ".").absolute() != folder]
    spec = PathFinder.find_spec(name, elsewhere)
    return spec is not None and spec.origin is not None


def _source(spec: ModuleSpec) -> Path | None:
    return Path(spec.origin) if spec.origin is not None and spec.has_location else None
