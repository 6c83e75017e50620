"""The package's source: its modules, their trees, imports and objects, each parsed once."""

import ast
import functools
from pathlib import Path

from tests._support.paths import ROOT

PACKAGE = ROOT / "areal_gym"
PATHS = sorted(PACKAGE.rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def module_name(path: Path) -> str:
    """Return a module's dotted name below `areal_gym`; "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in PATHS}


@functools.cache
def source(name: str) -> str:
    return MODULES[name].read_text()


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(source(name))


def folder(name: str) -> str:
    """Return the top folder, or top module, of a module."""
    return name.partition(".")[0] or "__init__"


def imported_modules(name: str) -> set[str]:
    """Return the package's modules that a module imports anywhere, TYPE_CHECKING included."""
    modules = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                modules.add(full if full.removeprefix("areal_gym.") in MODULES else node.module)
    inside = {m.removeprefix("areal_gym.") for m in modules if m.startswith("areal_gym.")}
    return inside & MODULES.keys() - {name}


def public_objects(name: str) -> list[tuple[str, Documented]]:
    """Return the module, its classes and functions without leading underscores, by name."""
    objects: list[tuple[str, Documented]] = [(name, tree(name))]

    def add(prefix: str, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, Documented) and not node.name.startswith("_"):
                objects.append((f"{prefix}.{node.name}", node))
                if isinstance(node, ast.ClassDef):
                    add(f"{prefix}.{node.name}", node.body)

    if not any(part.startswith("_") for part in name.split(".")):
        add(name, tree(name).body)
    return objects


def functions(name: str) -> list[tuple[str, Function]]:
    """Return all functions and methods of a module, nested ones too."""
    return [(node.name, node) for node in ast.walk(tree(name)) if isinstance(node, Function)]
