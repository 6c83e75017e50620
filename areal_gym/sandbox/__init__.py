"""Sandboxes run untrusted code.

result = await shared_sandbox().run("print(6 * 7)")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_gym.sandbox.base import (
        Sandbox,
        SandboxLevel,
        SandboxLimits,
        SandboxReport,
        SandboxResult,
        SandboxStatus,
        Session,
    )
    from areal_gym.sandbox.docker import DockerSandbox
    from areal_gym.sandbox.grader import Grader
    from areal_gym.sandbox.process import NoSandbox, ProcessSandbox
    from areal_gym.sandbox.shared_pool import shared_calls, shared_reports, shared_sandbox

__all__ = [
    "DockerSandbox",
    "Grader",
    "NoSandbox",
    "ProcessSandbox",
    "Sandbox",
    "SandboxLevel",
    "SandboxLimits",
    "SandboxReport",
    "SandboxResult",
    "SandboxStatus",
    "Session",
    "shared_calls",
    "shared_reports",
    "shared_sandbox",
]

_MODULES = {
    "DockerSandbox": "docker",
    "Grader": "grader",
    "NoSandbox": "process",
    "ProcessSandbox": "process",
    "shared_calls": "shared_pool",
    "shared_reports": "shared_pool",
    "shared_sandbox": "shared_pool",
}


def __getattr__(name: str) -> Any:
    # Lazy: the plugin beside us is imported by every command, and asyncio is not free.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'base')}")
    return getattr(module, name)
