"""Registers our environments with Gymnasium as soon as both are imported, in either order.

Importing Gymnasium takes a good part of a second, too long for `areal-gym --help`; but
`import areal_gym, gymnasium; gymnasium.make("areal_gym/tir-v0")` must work. So the registration
runs at once if Gymnasium is imported already, and right after its import otherwise.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_gym.plugins import EnvSpec


def register_when_imported() -> None:
    """Register the environments now, or when Gymnasium is imported."""
    if "gymnasium" in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def gymnasium_id(spec: EnvSpec) -> str:
    """Return `areal_gym/math-multi-turn-v0` for `math/multi-turn`; namespaces do not nest."""
    name = spec.id.replace("/", "-").replace(":", "-")
    return f"areal_gym/{name}-v{spec.version}"


def _register() -> None:
    """Register every environment; nothing is imported for it.

    An id that two plugins claim is left out: asking our own registry for it says why.
    """
    import gymnasium

    from areal_gym.plugins import EnvSpec, registry

    entries = registry().entries("envs")
    ids = [entry.id for entry in entries]
    for entry in entries:
        spec = entry.spec
        assert isinstance(spec, EnvSpec)
        if ids.count(spec.id) > 1 or gymnasium_id(spec) in gymnasium.registry:
            continue
        gymnasium.register(
            gymnasium_id(spec),
            entry_point=spec.entry_point,
            kwargs=dict(spec.kwargs),
            # The episode's own checks are in TextEnv; wrappers around each step would cost more
            # than the step. `areal-gym check` runs Gymnasium's checker.
            order_enforce=False,
            disable_env_checker=True,
        )


class _Watch:
    """Finds Gymnasium as usual, and registers the environments after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            # The loader itself stays: resources and reloads ask the module for it.
            setattr(spec.loader, "exec_module", execute_and_register)  # noqa: B010
        return spec
