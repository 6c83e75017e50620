"""Which part of the package may import which: ten floors, ground floor first."""

import ast
import graphlib

import pytest

from tests._support.package_source import MODULES, source, tree

BASE = {
    "errors",
    "types",
    "version",
    "utils",
    "message_types",
    "token_arrays",
    "images",
    "episode_roles",
}
COMMON = BASE | {"plugins", "config", "chat"}

FLOORS = (
    (
        "records, errors, helpers without words of reinforcement learning",
        (
            "errors",
            "version",
            "message_types",
            "token_arrays",
            "types",
            "episode_roles",
            "utils",
            "images",
            "_moved",
        ),
    ),
    ("the kinds of plugins and the registry", ("plugins",)),
    ("settings; messages and tokens; templates of plugin packages", ("config", "chat", "scaffold")),
    (
        "parts that need nothing but the floors below",
        ("models", "sandbox", "places", "loggers", "report", "run_dir", "tasks", "rewards"),
    ),
    ("environments and engines, which do not know each other", ("envs", "engines")),
    (
        "around an episode: agents, recording, the gateway; the viewer",
        ("agents", "recording", "gateway", "viewer"),
    ),
    ("the two halves of training, which do not know each other", ("rollout", "trainer")),
    (
        "the small default policy; processes on other machines; plans for GPUs",
        ("warm_start", "distributed", "plan"),
    ),
    ("the composition root: it knows everything below", ("runs",)),
    (
        "the doors: the command line and the public API",
        ("cli", "testing", "_gymnasium", "__main__", ""),
    ),
)
"""The parts of the package by floor; a part imports from its own floor and those below."""

KNOWN_EXCEPTIONS = {("rollout", "runs.episodes")}
"""Imports of a higher floor: `areal_gym.rollout(...)` is a function and a package in one name."""

# Part -> what it may import besides itself, in the order of the floors. A dotted name allows only
# that module and what is below it; a trailing "=" only the package itself (its lazy names).
# Environments know sandboxes by their contract and the shared pool; engines know models.
MAY_IMPORT = {
    "errors": set(),
    "version": set(),
    "message_types": set(),
    "token_arrays": set(),
    "types": {"message_types", "token_arrays", "utils"},
    "episode_roles": {"types"},
    "images": {"errors", "message_types", "types", "utils"},
    "utils": {"errors"},
    "_moved": set(),
    "plugins": {"errors", "version", "utils"},
    "config": {"errors", "utils"},
    "chat": BASE,
    "scaffold": {"errors", "plugins"},
    "models": COMMON,
    "sandbox": COMMON,
    "places": COMMON | {"sandbox"},
    "loggers": COMMON,
    "rewards": COMMON | {"sandbox="},
    "report": COMMON | {"run_dir"},
    "run_dir": COMMON,
    "tasks": COMMON,
    "envs": COMMON | {"places", "sandbox.base", "sandbox=", "tasks", "rewards"},
    "engines": COMMON | {"models"},
    "agents": COMMON | {"places", "envs.base", "envs.tools", "engines.base", "sandbox.base"},
    "recording": COMMON | {"engines.base", "envs.base"},
    "gateway": COMMON | {"engines.base", "recording"},
    "viewer": COMMON | {"run_dir", "report"},
    "rollout": COMMON
    | {
        "tasks",
        "envs.base",
        "envs.task_drawing",
        "envs.tools",
        "engines.base",
        "agents.base",
        "recording",
    }
    | {"places", "gateway.shared_gateway", "gateway.session", "runs.episodes"},
    "trainer": COMMON | {"models", "engines.base"},
    "warm_start": COMMON | {"envs", "engines", "models", "trainer"},
    "distributed": COMMON
    | {"envs", "engines", "models", "agents", "recording", "rollout", "trainer"},
    "plan": COMMON | {"models", "trainer"},
    "runs": COMMON
    | {"agents", "distributed", "engines", "envs", "gateway", "loggers", "models", "recording"}
    | {"report", "rewards", "rollout", "run_dir", "sandbox", "tasks", "trainer", "warm_start"},
    "cli": COMMON
    | {"plan", "runs", "run_dir", "report", "scaffold", "viewer", "envs.server", "envs.base"}
    | {
        "envs.checker",
        "envs.benchmarks",
        "envs.tau2",
        "envs.contamination",
        "envs.harbor",
        "tasks",
        "rewards",
        "_gymnasium",
    },
    "testing": COMMON | {"engines", "models", "rewards", "trainer", "warm_start"},
    "_gymnasium": {"plugins"},
    "__main__": {"cli"},
    "": {"_gymnasium", "_moved", "agents", "engines", "envs", "report.notebook", "rollout"}
    | {"run_dir", "runs"}
    | COMMON,
}

HEAVY = {"torch", "transformers", "datasets", "ray", "docker", "matplotlib", "sympy"} | {
    "math_verify",
    "tensorboard",
    "trackio",
    "wandb",
}
MAY_BE_HEAVY = ("models", "trainer", "engines.embedded", "warm_start", "plan")


def imports_of(tree):
    """Full names of everything imported, wherever in the module; relative ones stay inside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                continue
            if node.module == "areal_gym":
                yield from (f"areal_gym.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module


def is_within(name, packages):
    return f"{name}=" in packages or any(f"{name}.".startswith(f"{p}.") for p in packages)


def test_modules_import_only_allowed_layers():
    packages = {module.partition(".")[0] for module in MODULES}
    assert packages <= MAY_IMPORT.keys()  # a new one has no layer yet: add it to the table
    for module in MODULES:
        package = module.partition(".")[0]
        for imported in imports_of(tree(module)):
            if not imported.startswith("areal_gym."):
                continue
            target = imported.removeprefix("areal_gym.")
            if package and is_within(target, [package]):
                continue
            assert is_within(target, MAY_IMPORT[package]), f"{module} must not import {target}"


def test_each_part_stands_on_one_floor():
    parts = [part for _, parts in FLOORS for part in parts]
    assert sorted(parts) == sorted(MAY_IMPORT)


def test_parts_import_from_their_own_floor_and_below():
    floor_of = {part: floor for floor, (_, parts) in enumerate(FLOORS) for part in parts}
    for part, allowed in MAY_IMPORT.items():
        for name in allowed:
            target = name.partition(".")[0].removesuffix("=")
            is_below = floor_of[target] <= floor_of[part]
            assert is_below or (part, name) in KNOWN_EXCEPTIONS, f"{part} must not import {name}"


def test_no_import_circle_between_parts():
    graph = {
        part: {
            name.partition(".")[0].removesuffix("=")
            for name in allowed
            if (part, name) not in KNOWN_EXCEPTIONS
        }
        for part, allowed in MAY_IMPORT.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_heavy_packages_are_imported_on_use():
    for module in MODULES:
        if is_within(module, MAY_BE_HEAVY) and not module.endswith("plugin"):
            continue
        for node in module_level(tree(module)):
            for imported in imports_of(node):
                assert imported.partition(".")[0] not in HEAVY, f"{module} imports {imported}"


def module_level(tree):
    """Statements that run on import; `if TYPE_CHECKING:` does not."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try):
            yield from node.body


@pytest.mark.parametrize("module", [name for name in MODULES if name.endswith(".plugin")])
def test_plugin_module_imports_only_plugins(module):
    allowed = {"__future__", "collections.abc", "areal_gym.plugins"}
    assert set(imports_of(tree(module))) <= allowed


def test_all_is_sorted_and_exists():
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = ast.literal_eval(node.value)
                assert len(names) == len(set(names)), module
                # ruff sorts as people read: CONSTANTS, Classes, functions.
                assert names == sorted(names, key=_reading_order), module


def _reading_order(name):
    is_constant = name.isupper()
    return (0 if is_constant else 1 if name.lstrip("_")[:1].isupper() else 2, name)


def test_median_module_is_short():
    lengths = sorted(len(source(module).splitlines()) for module in MODULES)
    assert lengths[len(lengths) // 2] < 200
