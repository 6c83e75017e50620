"""Who may import whom. The table is the one of the architecture; ground floor first."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "areal_gym"

GROUND = {"errors", "types", "metrics", "version", "markup", "records"}
SETTINGS = {
    "cache",
    "settings",
    "algorithms",
    "config",
    "rendering",
    "dialects",
    "files",
    "run_status",
    "http_servers",
    "rundir",
    "provenance",
    "learning_curve",
    "objectives",
    "online",
    "progress",
    "report",
    "trajectory_files",
}
LOW = GROUND | SETTINGS | {"plugins"}
BASES = {"envs.base", "envs.tools", "engines.base", "sandbox.base"}
BELOW_RUN = LOW | {
    "loggers",
    "modeling",
    "sandbox",
    "envs",
    "engines",
    "agents",
    "capture",
    "gateway",
    "rollout",
    "trainer",
    "starter",
}

MAY_IMPORT = {
    "errors": set(),
    "markup": set(),
    "records": set(),
    "types": {"markup", "records"},
    "metrics": set(),
    "version": set(),
    "plugins": GROUND,
    **{name: LOW for name in SETTINGS},
    "modeling": LOW,
    "scaffold": {"errors"},
    "serving": LOW | {"envs.base", "envs.tools"},
    "loggers": LOW,
    "sandbox": LOW,
    # The sandbox package itself: its shared pool, looked up on first use.
    "envs": LOW | {"sandbox.base", "sandbox="},
    "engines": LOW | {"modeling"},
    "agents": LOW | BASES,
    "capture": LOW | {"engines.base"},
    # The server is before the policy, not before environments.
    "gateway": LOW | {"engines.base", "capture"},
    "rollout": LOW | BASES | {"agents.base", "capture", "gateway.shared", "gateway.session"},
    "trainer": LOW | {"modeling", "engines.base"},
    "starter": BELOW_RUN,
    "distributed": BELOW_RUN,
    "run": BELOW_RUN | {"distributed", "playing"},
    # `play` and `check` are about environments: their contract and its checker, no live engine;
    # tau2 has a benchmark to agree with, and data to fetch.
    "cli": LOW
    | {"run", "scaffold", "serving", "envs.base", "envs.checker", "envs.registration", "envs.tau2"}
    | {"envs.contamination", "viewer"},
    "viewer": LOW,
    # Episodes outside of training, by whatever policy.
    "playing": BELOW_RUN,
    # Runs for scripts and notebooks: what the command line does and shows.
    "learning": LOW | {"run", "cli.display"},
    # The public API names everything, and imports it on first use.
    "": BELOW_RUN | {"_gymnasium", "playing", "learning", "run"},
    # Contracts that plugin authors run in their tests.
    "testing": LOW | {"trainer"},
    "_gymnasium": {"envs.registration"},
    "__main__": {"cli"},
}

HEAVY = {"torch", "transformers", "datasets", "ray", "docker", "matplotlib", "sympy"} | {
    "math_verify",
    "tensorboard",
    "trackio",
    "wandb",
}
MAY_BE_HEAVY = ("modeling", "trainer", "engines.embedded", "starter")

MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


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


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_layer_may(path):
    module = name_of(path)
    package = module.partition(".")[0]
    assert package in MAY_IMPORT, f"{package} has no layer; add it to the table"
    for imported in imports_of(ast.parse(path.read_text())):
        if not imported.startswith("areal_gym."):
            continue
        target = imported.removeprefix("areal_gym.")
        if package and is_within(target, [package]):
            continue
        assert is_within(target, MAY_IMPORT[package]), f"{module} must not import {target}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_heavy_packages_are_imported_on_use(path):
    module = name_of(path)
    if is_within(module, MAY_BE_HEAVY) and not module.endswith("plugin"):
        return
    for node in module_level(ast.parse(path.read_text())):
        for imported in imports_of(node):
            assert imported.partition(".")[0] not in HEAVY, f"{module} imports {imported}"


def module_level(tree):
    """Statements that run on import; `if TYPE_CHECKING:` does not."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try):
            yield from node.body


@pytest.mark.parametrize("path", sorted(ROOT.rglob("plugin.py")), ids=name_of)
def test_a_plugin_module_imports_only_plugins(path):
    allowed = {"__future__", "collections.abc", "areal_gym.plugins"}
    assert set(imports_of(ast.parse(path.read_text()))) <= allowed


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_all_is_sorted_and_exists(path):
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            assert len(names) == len(set(names))
            # ruff sorts as people read: CONSTANTS, Classes, functions.
            assert names == sorted(names, key=_reading_order)


def _reading_order(name):
    is_constant = name.isupper()
    return (0 if is_constant else 1 if name.lstrip("_")[:1].isupper() else 2, name)


def test_modules_stay_readable():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert not {name: n for name, n in lengths.items() if n > 600}
    assert sorted(lengths.values())[len(lengths) // 2] < 200
