"""The built-in sandboxes."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import SandboxSpec, hookimpl


@hookimpl
def register_sandboxes() -> Iterable[SandboxSpec]:
    """Where untrusted code runs."""
    yield SandboxSpec(
        id="process",
        entry_point="areal_gym.sandbox.process:ProcessSandbox",
        summary="forked, walled-in Python processes on this machine; no network, no files",
    )
