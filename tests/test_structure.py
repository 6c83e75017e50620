"""The package's shape: no import circle, few loose modules, unique names, short units."""

import ast
from collections import Counter

from tests._support.package_source import (
    MODULES,
    PACKAGE,
    functions,
    imported_modules,
    source,
    tree,
)

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 75
MAX_LOOSE_MODULES = 12

LONG_MODULES: dict[str, int] = {}
"""Modules above the limit, with the lines they may have. It may only shrink."""

LONG_FUNCTIONS: dict[str, int] = {}
"""Functions above the limit, with the lines they may have. It may only shrink."""

SHARED_NAMES = {"base", "plugin", "__main__"}
"""Module names that several folders use in one sense."""

NAMES_USED_TWICE: set[str] = {"tasks", "scheduler", "groups"}
CIRCLES_LEFT: list[set[str]] = []


PUBLIC_MODULES: list[str] = [
    "agents.base",
    "engines.base",
    "envs.base",
    "envs.countdown",
    "envs.tools",
    "loggers.base",
    "sandbox.process",
    "testing.engine_contract",
    "trainer.algorithms.advantages",
    "trainer.algorithms.losses",
]
"""Modules outside of an `__init__` that list their public names."""


def import_circles() -> list[set[str]]:
    """Return the strongly connected components of the imports with more than one module."""
    # Tarjan's algorithm.
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for target in imported_modules(module):
            if target not in number:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], number[target])
        if lowest[module] == number[module]:
            place = stack.index(module)
            component = set(stack[place:])
            del stack[place:]
            if len(component) > 1:
                circles.append(component)

    for module in MODULES:
        if module not in number:
            visit(module)
    return circles


def test_modules_import_no_circles():
    circles = import_circles()
    unexpected = [
        sorted(circle)
        for circle in circles
        if not any(circle <= allowed for allowed in CIRCLES_LEFT)
    ]
    assert unexpected == []


def test_top_folder_has_few_modules():
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_LOOSE_MODULES


def test_module_names_are_unique():
    modules = (path.stem for path in MODULES.values() if path.stem != "__init__")
    repeated = {name for name, count in Counter(modules).items() if count > 1}
    assert repeated - SHARED_NAMES <= NAMES_USED_TWICE


def test_modules_are_short():
    lengths = {name: len(source(name).splitlines()) for name in MODULES}
    assert {
        name: lines
        for name, lines in lengths.items()
        if lines > LONG_MODULES.get(name, MAX_MODULE_LINES)
    } == {}


def test_functions_are_short():
    long = {}
    for module in MODULES:
        for name, node in functions(module):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            full = f"{module}.{name}"
            if lines > LONG_FUNCTIONS.get(full, MAX_FUNCTION_LINES):
                long[full] = lines
    assert long == {}


def test_private_modules_have_no_all():
    """`__all__` is for packages whose names people import."""
    with_all = [
        name
        for name, path in MODULES.items()
        if path.name != "__init__.py"
        and any(
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for node in tree(name).body
        )
    ]
    assert set(with_all) <= set(PUBLIC_MODULES)
