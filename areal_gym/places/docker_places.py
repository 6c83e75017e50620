"""Places on a Docker engine: a container each, of the task's image."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

from areal_gym.errors import SandboxError
from areal_gym.places.base import PlaceImage, PlaceLimits
from areal_gym.places.docker_place import DockerPlace
from areal_gym.places.engine_calls import engine_errors, remove_container
from areal_gym.places.images import ImageBuilder
from areal_gym.places.owners import is_gone, new_owner
from areal_gym.sandbox.containers import connect

T = TypeVar("T")

LABEL = "areal-gym.place"
"""The label of all places; its value names their owner (`owners`)."""

_MEMORY_MB = 2048
_NUM_STARTS = 8
_NUM_COMMANDS = 256
# A shell is what a place needs anyway; the engine's init ends it and reaps orphans.
_KEEPER = ["/bin/sh", "-c", "while :; do sleep 86400; done"]
# What package managers and tests need as root, inside the container only.
_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]


class DockerPlaces:
    """Starts places on a Docker engine on this machine (or podman's compatible socket).

    A place has the task's image and a writable layer, no network, an init as its first process,
    and limits of memory, processors and processes. `storage_mb` is not enforced: few storage
    drivers can. Containers of owners that were killed are removed when the first place starts.

    Args:
        build_args: arguments of all builds, such as `BASE_IMAGE`.
        build_network: the network of builds; "none" forbids it. Default: the engine's.
        runtime: the engine's name of the container runtime, such as "runsc". Default: its own.
    """

    def __init__(
        self,
        *,
        build_args: Mapping[str, str] | None = None,
        build_network: str | None = None,
        runtime: str | None = None,
    ) -> None:
        self._images = ImageBuilder(build_args or {}, network=build_network)
        self._runtime = runtime
        self._owner = new_owner()
        self._client: Any = None
        self._connecting = asyncio.Lock()
        self._starts = asyncio.Semaphore(_NUM_STARTS)
        # Pools of our own: commands wait long, and must not keep others from being killed.
        self._control = ThreadPoolExecutor(_NUM_STARTS, "place-engine")
        self._commands = ThreadPoolExecutor(_NUM_COMMANDS, "place-command")

    async def start(self, image: PlaceImage, limits: PlaceLimits) -> DockerPlace:
        """Return a started place, or raise SandboxError."""
        name = await self.build(image)
        async with self._starts:
            started = asyncio.ensure_future(self._call(self._create, name, image, limits))
            try:
                container = await asyncio.shield(started)
            except asyncio.CancelledError:
                started.add_done_callback(self._discard)
                raise
        return DockerPlace(container, control=self._control, commands=self._commands)

    async def build(self, image: PlaceImage) -> str:
        """Build the image of later places, if need be; return its name or raise SandboxError."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._call(connect)
                await self._call(_remove_abandoned, self._client)
        with engine_errors("the image of a place"):
            return await self._images.resolve(self._client, image)

    async def aclose(self) -> None:
        """Remove all places of this object. May be called twice."""
        client, self._client = self._client, None
        if client is None:
            return
        try:
            try:
                await self._call(_remove_all, client, self._owner)
            except SandboxError:
                raise
            except RuntimeError:  # the interpreter is ending, which starts no thread any more
                _remove_all(client, self._owner)
        finally:
            self._control.shutdown(wait=False)
            self._commands.shutdown(wait=False)

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._control, function, *arguments)

    def _discard(self, started: asyncio.Future[Any]) -> None:
        if not started.cancelled() and started.exception() is None:
            self._control.submit(remove_container, started.result())

    def _create(self, name: str, image: PlaceImage, limits: PlaceLimits) -> Any:
        import docker

        with engine_errors(f"a place of {name!r}"):
            self._require_fits(limits)
            try:
                container = self._client.containers.create(name, **self._options(image, limits))
            except docker.errors.ImageNotFound:
                raise SandboxError(
                    f"the engine has no image {name!r}", hints=(f"docker pull {name}",)
                ) from None
            try:
                container.start()
                container.reload()  # now it has a pid
                if container.status != "running":
                    raise SandboxError(f"the place of {name!r} has ended at once")
            except BaseException as error:
                remove_container(container)
                if isinstance(error, docker.errors.APIError) and "/bin/sh" in str(error):
                    raise SandboxError(
                        f"the image {name!r} has no shell: {error.explanation}",
                        hints=("a place needs /bin/sh and sleep in its image",),
                    ) from error
                raise
        return container

    def _options(self, image: PlaceImage, limits: PlaceLimits) -> dict[str, Any]:
        import docker

        memory = f"{limits.memory_mb or _MEMORY_MB}m"
        return {
            "name": f"areal-gym-place-{secrets.token_hex(8)}",
            "entrypoint": _KEEPER,
            "command": [],
            "init": True,
            "user": "0:0",
            "labels": {LABEL: self._owner},
            "environment": dict(image.env),
            "working_dir": image.workdir,
            "runtime": self._runtime,
            "network_mode": "none",
            "ipc_mode": "private",
            "shm_size": "64m",
            "cap_drop": ["ALL"],
            "cap_add": _CAPABILITIES,
            "security_opt": ["no-new-privileges"],
            "mem_limit": memory,
            "memswap_limit": memory,
            "nano_cpus": int((limits.cpus or 1) * 10**9),
            "pids_limit": limits.num_processes,
            "ulimits": [docker.types.Ulimit(name="core", soft=0, hard=0)],
            "log_config": docker.types.LogConfig(type="none"),
        }

    def _require_fits(self, limits: PlaceLimits) -> None:
        """Raise SandboxError if the machine has less than a task asks for."""
        info = self._client.info()
        for asked, there, unit in (
            (limits.cpus or 0, info["NCPU"], "processors"),
            (limits.memory_mb or 0, info["MemTotal"] >> 20, "MB of memory"),
        ):
            if asked > there:
                raise SandboxError(
                    f"the task asks for {asked:g} {unit}, and the machine has {there:g}"
                )


def _remove_all(client: Any, owner: str) -> None:
    """Wait until no place of `owner` is left."""
    filters = {"label": f"{LABEL}={owner}"}
    deadline = time.monotonic() + 30.0
    with closing(client), engine_errors("the end of places"):
        while left := client.containers.list(all=True, sparse=True, filters=filters):
            for container in left:
                remove_container(container)
            if time.monotonic() > deadline:
                raise SandboxError(f"{len(left)} places could not be removed within 30 s")


def _remove_abandoned(client: Any) -> None:
    """Remove the places of owners that were killed."""
    with engine_errors("the remains of earlier places"):
        for container in client.containers.list(all=True, sparse=True, filters={"label": LABEL}):
            if is_gone(container.attrs["Labels"].get(LABEL, "")):
                remove_container(container)
