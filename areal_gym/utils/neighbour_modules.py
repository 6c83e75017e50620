"""Find the modules beside a user's file that it imports: `rewards.py` imports `helpers.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from areal_gym.errors import ConfigError


def neighbours(file: Path) -> list[Path]:
    """Return the files in or below the folder that the file imports, directly or indirectly.

    They are found by parsing the code, without executing it. Imports inside functions are included;
    names that are made at run time, and installed packages, are not.
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
    """Raise ConfigError if an `import` of the file got another module than the one beside it.

    Python has only one module of a name, so a `helpers.py` in two folders cannot be used twice.
    """
    folder = file.absolute().parent
    for name in {name.partition(".")[0] for name in _imported_names(file)}:
        spec = PathFinder.find_spec(name, [str(folder)])
        other = getattr(sys.modules.get(name), "__file__", None)
        if spec is None or spec.origin is None or other is None or name in sys.stdlib_module_names:
            continue
        neighbour, loaded = Path(spec.origin), Path(other)
        is_other = loaded.is_file() and not loaded.samefile(neighbour)
        if is_other and loaded.read_bytes() != neighbour.read_bytes():
            raise ConfigError(
                f"{file} imports {name}, and Python has another module of that name: {loaded}",
                hints=[f"rename {neighbour}"],
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
    """Yield the names that the code imports; for `from a import b`, it is `a.b`."""
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
    """Return the module from which `from ... import` imports; None if it is outside the folder."""
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
