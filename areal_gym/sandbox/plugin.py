"""The built-in sandboxes and places."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import PlaceSpec, SandboxSpec, hookimpl


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


@hookimpl
def register_places() -> Iterable[PlaceSpec]:
    """Yield the built-in places."""
    text = "a place per episode on this machine, without an engine or a network"
    path = "areal_gym.places.local_places:LocalPlaces"
    yield PlaceSpec(id="local", entry_point=path, summary=text)
    text = "a container per episode, of the task's image, without network"
    path = "areal_gym.places.docker_places:DockerPlaces"
    yield PlaceSpec(
        id="docker", entry_point=path, summary=text, requires=("docker",), extra="docker"
    )
    text = "an environment of Harbor per episode: its clouds (places_kwargs.type=daytona, ...)"
    path = "areal_gym.places.harbor_places:HarborPlaces"
    yield PlaceSpec(
        id="harbor", entry_point=path, summary=text, requires=("harbor",), extra="harbor"
    )
