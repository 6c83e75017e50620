"""Places on a Docker engine: a container each, of the task's image."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from areal_gym.errors import SandboxError
from areal_gym.places.base import Place, PlaceImage, PlaceLimits
from areal_gym.places.docker_place import DockerPlace
from areal_gym.places.engine_calls import engine_errors, remove_container
from areal_gym.places.images import ImageBuilder
from areal_gym.places.keeper_commands import Commands
from areal_gym.places.keeper_socket import (
    FOLDER,
    KeeperSocket,
    keeper_entrypoint,
    remove_abandoned_sockets,
)
from areal_gym.places.owners import is_gone, new_owner
from areal_gym.places.pool import PlacePool, StartedAnew
from areal_gym.sandbox.containers import connect

T = TypeVar("T")

LABEL = "areal-gym.place"
"""The label of all places; its value names their owner (`owners`)."""

_MEMORY_MB = 2048
_NUM_STARTS = 8
_NUM_COMMANDS = 256
_IMAGES_MB = 40_000
# Where the image has no python3 for a keeper: the engine's init ends it and reaps orphans.
_WAITER = ["/bin/sh", "-c", "while :; do sleep 86400; done"]
# What package managers and tests need as root, inside the container only.
_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]


class DockerPlaces:
    """Starts places on a Docker engine on this machine (or podman's compatible socket).

    A place has the task's image and a writable layer, no network, a keeper as its first process
    that forks its commands (by the image's python3, 3.9 or later; without one, a command is an exec
    of the engine), and limits of memory, processors and processes. `storage_mb` is not enforced:
    few storage drivers can. Containers of owners that were killed are removed when the first place
    starts.

    Args:
        build_args: arguments of all builds, such as `BASE_IMAGE`.
        build_network: the network of builds; "none" forbids it. Default: the engine's.
        runtime: the engine's name of the container runtime, such as "runsc". Default: its own.
        spare: how many places wait, started ahead: after each start one more with the same image
            and limits, for the siblings of a group and for the verifier.
        images_mb: the size of all images that were built for places above which the least recently
            used that no container uses are removed.
    """

    def __init__(
        self,
        *,
        build_args: Mapping[str, str] | None = None,
        build_network: str | None = None,
        runtime: str | None = None,
        spare: int = 0,
        images_mb: int = _IMAGES_MB,
    ) -> None:
        self._images = ImageBuilder(
            build_args or {}, network=build_network, budget_bytes=images_mb << 20
        )
        self._pool = PlacePool(StartedAnew(self), spare=spare)
        self._without_keeper: set[str] = set()
        """Images in which no keeper starts."""
        self._keepers: set[KeeperSocket] = set()
        self._runtime = runtime
        self._owner = new_owner()
        self._closing: set[asyncio.Future[None]] = set()
        self._client: Any = None
        self._connecting = asyncio.Lock()
        self._starts = asyncio.Semaphore(_NUM_STARTS)
        # Pools of our own: commands wait long, and must not keep others from being killed.
        self._control = ThreadPoolExecutor(_NUM_STARTS, "place-engine")
        self._commands = ThreadPoolExecutor(_NUM_COMMANDS, "place-command")

    async def start(self, image: PlaceImage, limits: PlaceLimits) -> Place:
        """Return a started place that was never used, or raise SandboxError."""
        place = await self._pool.start(image, limits)
        self._pool.expect(image, limits)
        return place

    async def start_anew(self, image: PlaceImage, limits: PlaceLimits) -> DockerPlace:
        """Start a place now, whatever waits; or raise SandboxError."""
        starting = asyncio.ensure_future(self._start(image, limits))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._discard)
            raise

    async def _start(self, image: PlaceImage, limits: PlaceLimits) -> DockerPlace:
        name = await self.build(image)
        async with self._starts:
            if name not in self._without_keeper:
                place = await self._start_once(name, image, limits, has_keeper=True)
                if place is not None:
                    return place
                self._without_keeper.add(name)
            place = await self._start_once(name, image, limits, has_keeper=False)
            if place is None:
                raise SandboxError(f"the place of {name!r} has ended at once")
            return place

    async def _start_once(
        self, name: str, image: PlaceImage, limits: PlaceLimits, *, has_keeper: bool
    ) -> DockerPlace | None:
        """Start a container; return its place, or None if its first process has ended."""
        keeper = KeeperSocket(self._owner)
        self._keepers.add(keeper)
        container, user = None, ""
        try:
            options = self._options(image, limits, keeper.folder if has_keeper else None)
            container, user = await self._call(self._create, name, options, limits)

            async def is_running() -> bool:
                await self._call(container.reload)
                return str(container.status) == "running"

            start = partial(self._call, _start_container, container, name)
            connection = None
            if has_keeper:
                connection = await keeper.connect(start, is_running)
            else:
                await start()
            if (connection is None) if has_keeper else not await is_running():
                await self._remove(container, keeper)
                return None
        except BaseException:
            await self._remove(container, keeper)
            raise
        return DockerPlace(
            container,
            commands=None if connection is None else Commands(connection),
            keeper=keeper,
            user=user,
            control=self._control,
            waiting=self._commands,
        )

    async def _remove(self, container: Any, keeper: KeeperSocket) -> None:
        keeper.remove()
        if container is not None:
            await self._call(remove_container, container)

    async def build(self, image: PlaceImage) -> str:
        """Build the image of later places, if need be; return its name or raise SandboxError."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._call(connect)
                await self._call(_remove_abandoned, self._client)
                await self._call(remove_abandoned_sockets)
        with engine_errors("the image of a place"):
            return await self._images.resolve(self._client, image)

    async def aclose(self) -> None:
        """Remove all places of this object. May be called twice."""
        await self._pool.aclose()
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
            for keeper in self._keepers:
                keeper.remove()
            self._control.shutdown(wait=False)
            self._commands.shutdown(wait=False)

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._control, function, *arguments)

    def _discard(self, started: asyncio.Future[DockerPlace]) -> None:
        if not started.cancelled() and started.exception() is None:
            closing = asyncio.ensure_future(started.result().aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _create(self, name: str, options: dict[str, Any], limits: PlaceLimits) -> tuple[Any, str]:
        """Return a new container, and the user that its image names."""
        import docker

        with engine_errors(f"a place of {name!r}"):
            self._require_fits(limits)
            try:
                user = self._client.images.get(name).attrs["Config"].get("User") or "0"
                return self._client.containers.create(name, **options), user
            except docker.errors.ImageNotFound:
                raise SandboxError(
                    f"the engine has no image {name!r}", hints=(f"docker pull {name}",)
                ) from None

    def _options(
        self, image: PlaceImage, limits: PlaceLimits, keeper: Path | None
    ) -> dict[str, Any]:
        """Return the options of a container; `keeper` is the folder of its keeper's socket."""
        import docker

        memory = f"{limits.memory_mb or _MEMORY_MB}m"
        return {
            "name": f"areal-gym-place-{secrets.token_hex(8)}",
            "entrypoint": _WAITER if keeper is None else keeper_entrypoint(),
            "command": [],
            "init": keeper is None,
            "volumes": {} if keeper is None else {str(keeper): {"bind": FOLDER, "mode": "ro"}},
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
            "pids_limit": limits.num_processes + 1,  # the first process
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


def _start_container(container: Any, name: str) -> None:
    """Start a container, or raise SandboxError."""
    import docker

    with engine_errors(f"a place of {name!r}"):
        try:
            container.start()
        except docker.errors.APIError as error:
            if "/bin/sh" not in str(error):
                raise
            raise SandboxError(
                f"the image {name!r} has no shell: {error.explanation}",
                hints=("a place needs /bin/sh and sleep in its image",),
            ) from error


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
