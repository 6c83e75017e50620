"""The built-in sandboxes."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import SandboxSpec, hookimpl


@hookimpl
def register_sandboxes() -> Iterable[SandboxSpec]:
    """Yield the built-in sandboxes."""
    yield SandboxSpec(
        id="process",
        entry_point="areal_gym.sandbox.process:ProcessSandbox",
        summary="forked, confined Python processes on this machine; no network, no files",
    )
    yield SandboxSpec(
        id="docker",
        entry_point="areal_gym.sandbox.docker:DockerSandbox",
        summary="warm containers without network, from an image of your choice",
        requires=("docker",),
    )
    yield SandboxSpec(
        id="none",
        entry_point="areal_gym.sandbox.process:NoSandbox",
        summary="no confinement: code runs with your permissions",
    )
