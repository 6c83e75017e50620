"""Old import paths of documented modules: they keep working and warn (`DeprecationWarning`)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MOVED = {
    "algorithms": "config.algorithm_settings",
    "dialects": "chat.tool_call_formats",
    "envs.tasks": "tasks",
    "learning": "runs.interactive",
    "metrics": "utils.statistics",
    "modeling": "models.tiny",
    "modeling.checkpoint": "models.tiny.checkpoint_files",
    "modeling.config": "models.tiny.decoder_config",
    "playing": "runs.episodes",
    "rendering": "chat",
    "run": "runs",
    "rundir": "run_dir.run_dir",
    "serving": "envs.server",
    "serving.client": "envs.server.remote_env",
    "serving.http": "envs.server.http_server",
    "serving.mcp": "envs.server.mcp_server",
    "serving.sessions": "envs.server.env_sessions",
    "settings": "config.settings_model",
    "starter": "warm_start",
    "trainer.learner": "trainer.trainer",
    "trainer.objective": "trainer.chunked_logprobs",
    "trainer.weight_syncs": "trainer.weight_sync",
    "trainer.weight_syncs.lora": "trainer.weight_sync.adapters",
    "trajectory_files": "run_dir.trajectory_files",
    **{
        f"trainer.{name}": f"trainer.algorithms.{name}"
        for name in ("advantages", "corrections", "losses", "ratios", "token_advantages")
    },
    **{f"trainer.{name}": f"trainer.batch.{name}" for name in ("bins", "packing", "sequences")},
}
"""Old -> new, below `areal_gym`; modules inside of a package that moved are found by its name."""
RENAMED = {"Learner": "Trainer"}
"""Old -> new names of documented classes inside of modules that moved."""


def new_path(old: str) -> str | None:
    """Returns where a module lies today, as a full name; None if it did not move."""
    head, tail = old.removeprefix("areal_gym."), ""
    while head:
        if head in MOVED:
            return f"areal_gym.{MOVED[head]}{tail}"
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return None


class _MovedModule(ModuleType):
    """Forwards every attribute to the module at its new path."""

    def __init__(self, old: str, module: ModuleType) -> None:
        super().__init__(old, module.__doc__)
        self.__dict__["_module"] = module
        if hasattr(module, "__path__"):
            # Empty: modules inside are looked up by `_MovedModules`, never loaded a second time.
            self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], RENAMED.get(name, name))


class _MovedModules:
    """Finds and loads; a subclass of `importlib.abc.Loader` would cost a quarter of `--help`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_path(fullname) if fullname.startswith("areal_gym.") else None
        new_spec = None if new is None else find_spec(new)
        if new_spec is None:
            return None
        is_package = new_spec.submodule_search_locations is not None
        loader: Any = self
        return ModuleSpec(fullname, loader, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_path(spec.name)
        assert new is not None
        warnings.warn(
            f"{spec.name} has moved to {new}; the old path works until 1.0",
            DeprecationWarning,
            stacklevel=2,  # the import system's own frames are not counted
        )
        return _MovedModule(spec.name, import_module(new))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be executed: the module at the new path is imported already."""


def install() -> None:
    """Make old paths importable; they are looked for after everything else."""
    sys.meta_path.append(_MovedModules())
