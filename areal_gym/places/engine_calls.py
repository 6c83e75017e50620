"""Calls to a Docker engine that places share: their errors, and the end of a container."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from areal_gym.errors import SandboxError, SandboxUnreachableError


@contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """Turn failures of the engine into SandboxErrors that name what failed."""
    import docker
    import requests

    try:
        yield
    except (ConnectionError, FileNotFoundError, requests.ConnectionError) as error:
        raise SandboxUnreachableError(f"{what}: the engine is gone: {error}") from error
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise SandboxError(f"{what}: {error}") from error


def remove_container(container: Any) -> None:
    """Remove a container with its volumes, unless it is gone or on its way."""
    import docker

    try:
        container.remove(force=True, v=True)
    except docker.errors.APIError as error:
        if error.status_code not in (404, 409):
            raise
