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
        summary="forked, walled-in Python processes on this machine; no network, no files",
    )
    yield SandboxSpec(
        id="docker",
        entry_point="areal_gym.sandbox.docker:DockerSandbox",
        summary="warm containers without network, of an image that you choose",
        requires=("docker",),
    )
    yield SandboxSpec(
        id="none",
        entry_point="areal_gym.sandbox.none:NoSandbox",
        summary="no walls at all: code runs as you",
    )
