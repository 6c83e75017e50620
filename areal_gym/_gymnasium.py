"""Registers the environments with Gymnasium as soon as both are imported, in either order.

Importing Gymnasium takes a good part of a second, too long for `areal-gym --help`; but
`import areal_gym, gymnasium; gymnasium.make("areal_gym/tir-v0")` must work. So the registration
runs at once if Gymnasium is imported already, and right after its import otherwise.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_when_imported() -> None:
    """Register the environments now, or when Gymnasium is imported."""
    if "gymnasium" in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register() -> None:
    from areal_gym.envs.registration import register_envs

    register_envs()


class _Watch(importlib.abc.MetaPathFinder):
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
