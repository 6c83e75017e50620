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
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its true loader: resources and reloads ask for it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register()
