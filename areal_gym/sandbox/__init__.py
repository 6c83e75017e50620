"""Where untrusted code runs.

result = await shared_sandbox().run("print(6 * 7)")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_gym.sandbox.base import (
        Sandbox,
        SandboxLimits,
        SandboxResult,
        SandboxStatus,
        Session,
    )
    from areal_gym.sandbox.process import ProcessSandbox, ProcessSession
    from areal_gym.sandbox.shared import shared_sandbox

__all__ = [
    "ProcessSandbox",
    "ProcessSession",
    "Sandbox",
    "SandboxLimits",
    "SandboxResult",
    "SandboxStatus",
    "Session",
    "shared_sandbox",
]

_MODULES = {
    "ProcessSandbox": "process",
    "ProcessSession": "process",
    "shared_sandbox": "shared",
}


def __getattr__(name: str) -> Any:
    # Lazy: the plugin beside us is imported by every command, and asyncio is not free.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'base')}")
    return getattr(module, name)
