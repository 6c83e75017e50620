"""The contract of places: what a backend starts, and what can be done with it.

start -> run, put, listen -> freeze -> changes, take -> aclose
           ^__________________|  (a command starts a frozen place again)

Failures of the machine (a build, a start, an engine that is gone) are SandboxErrors, never results.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class PlaceImage:
    """The image of a place: a reference, or a folder with a Dockerfile."""

    reference: str | None = None
    folder: Path | None = None
    build_timeout_s: float = 600.0
    workdir: str | None = None
    """The working directory of commands; None: the image's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all commands."""


@dataclass(frozen=True, kw_only=True)
class PlaceLimits:
    """The limits of a place; None leaves the backend's own."""

    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    num_processes: int = 256


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """The result of one command; outputs are bounded by the place."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    is_timed_out: bool = False
    """Whether its time was over; all of its process group was killed."""


@dataclass(frozen=True, kw_only=True)
class FileChanges:
    """The differences of a place's files from its image, as absolute paths.

    An added folder stands for all below it; a folder that only holds changes is not listed.
    """

    written: tuple[str, ...]
    """Files, links and folders that are new or have another content."""
    removed: tuple[str, ...]
    """Paths of the image that are gone; one that was made anew is in both."""


@runtime_checkable
class Place(Protocol):
    """A started container without a network. Failures of the machine are SandboxErrors."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        timeout_s: float,
    ) -> CommandResult:
        """Run a command and wait for it; of a frozen place, start it again first."""

    async def put(self, tar: bytes, path: str) -> None:
        """Unpack an archive below a folder, as root and without following the place's links."""

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on 127.0.0.1:`port` inside the place, and nowhere else."""

    async def freeze(self) -> None:
        """End all processes; the files stay as they are."""

    async def changes(self) -> FileChanges:
        """Return how the files of a frozen place differ from those of its image."""

    async def take(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        """Return an archive of files and folders of a frozen place, without following links.

        Member names are paths without the leading slash; what does not exist is left out. More
        than `max_bytes` are cut off, which leaves an archive that cannot be read to its end.
        """

    async def aclose(self) -> None:
        """Remove the place and all that belongs to it. May be called twice."""


@dataclass(frozen=True, kw_only=True)
class ProgramPlace:
    """The place in which a program plays an episode, and the limits that the task gives it."""

    place: Place
    user: str | int | None = None
    """The user of the program; None: the place's own."""
    workdir: str | None = None
    timeout_s: float | None = None
    """The seconds that are left to it."""


@runtime_checkable
class Places(Protocol):
    """A backend: starts places."""

    async def start(self, image: PlaceImage, limits: PlaceLimits) -> Place:
        """Return a started place; what fails to build or to start is a SandboxError."""

    async def build(self, image: PlaceImage) -> str:
        """Build the image of later places, if need be, and return its key; or raise SandboxError.

        The same files and arguments have the same key.
        """

    async def aclose(self) -> None:
        """Remove all places of this object. May be called twice."""
