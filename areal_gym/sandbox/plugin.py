"""The built-in sandboxes."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import SandboxSpec, hookimpl


@hookimpl
def register_sandboxes() -> Iterable[SandboxSpec]:
    """Yield the built-in sandboxes."""
    text = "forked, confined Python processes on this machine; no network, no files"
    path = "areal_gym.sandbox.process:ProcessSandbox"
    yield SandboxSpec(id="process", entry_point=path, summary=text)
    text = "warm containers without network, from an image of your choice"
    path = "areal_gym.sandbox.docker:DockerSandbox"
    yield SandboxSpec(id="docker", entry_point=path, summary=text, requires=("docker",))
    text = "no confinement: code runs with your permissions"
    path = "areal_gym.sandbox.process:NoSandbox"
    yield SandboxSpec(id="none", entry_point=path, summary=text)
