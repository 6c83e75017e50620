"""Places on this machine without an engine: namespaces, an overlay, a filter of system calls."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_gym.errors import SandboxError
from areal_gym.places.base import Place, PlaceImage, PlaceLimits
from areal_gym.places.layer_store import LayerStore, LocalImage
from areal_gym.places.local_images import LocalImages
from areal_gym.places.local_place import LocalPlace
from areal_gym.places.local_server import LocalServer
from areal_gym.places.pool import PlacePool, StartedAnew
from areal_gym.utils.cache import cache_directory

_MEMORY_MB, _STORAGE_MB, _BUILD_MB, _SHM_MB = 2048, 512, 8192, 64
_NUM_STARTS = 8
_IMAGES_MB = 20_000


class LocalPlaces:
    """Starts places on this machine, without an engine.

    A place has an overlay over the image's layers, whose writable layer is in memory and bounded,
    namespaces of its own (users, processes, network, mounts, ...), few capabilities over its own
    files and users, and the sandbox's filter of system calls. Memory, processes and processors are
    limited by control groups where this user has some; memory is watched otherwise.

    As root, or as a user who may make user namespaces; SandboxError says what is missing.

    Args:
        build_args: arguments of all builds, such as `BASE_IMAGE`.
        packages: installed packages that the host's root has, with what they require.
        roots: folders or archives of root directories on this machine, by image name.
        spare: how many places wait, started ahead: after each start one more with the same image
            and limits, for the siblings of a group and for the verifier.
        images_mb: the size of all kept images above which the least recently used are removed.
        cache: where images are kept. Default: the cache directory.
    """

    def __init__(
        self,
        *,
        build_args: Mapping[str, str] | None = None,
        packages: Sequence[str] = (),
        roots: Mapping[str, Path | str] | None = None,
        spare: int = 0,
        images_mb: int = _IMAGES_MB,
        cache: Path | str | None = None,
    ) -> None:
        folder = Path(cache) if cache else cache_directory() / "places"
        # Layers have the owners of places, which differ between users.
        self._store = LayerStore(folder / f"local-{os.geteuid()}", images_mb << 20)
        self._images = LocalImages(
            self._store,
            build_args=build_args or {},
            packages=packages,
            roots=roots or {},
            start=self._start_build,
        )
        self._server: LocalServer | None = None
        self._connecting = asyncio.Lock()
        self._starts = asyncio.Semaphore(_NUM_STARTS)
        self._numbers = itertools.count(1)
        self._places: set[LocalPlace] = set()
        self._pool = PlacePool(StartedAnew(self), spare=spare)
        self._is_closed = False

    async def start(self, image: PlaceImage, limits: PlaceLimits) -> Place:
        """Return a started place that was never used, or raise SandboxError."""
        place = await self._pool.start(image, limits)
        self._pool.expect(image, limits)
        return place

    async def start_anew(self, image: PlaceImage, limits: PlaceLimits) -> LocalPlace:
        """Start a place now, whatever waits; or raise SandboxError."""
        settings = _settings(image, limits)
        server = await self._connect()
        built = await self._images.resolve(server, image)
        settings["environment"] = {**built.env, **image.env}
        settings["workdir"] = image.workdir or built.workdir
        return await self._start(server, built, settings)

    async def build(self, image: PlaceImage) -> str:
        """Build the image of later places, if need be; return its key or raise SandboxError."""
        return (await self._images.resolve(await self._connect(), image)).layers[0]

    async def report(self) -> tuple[str, ...]:
        """Return the names of the walls that stand here; SandboxError if there can be no place."""
        return (await self._connect()).protections

    async def aclose(self) -> None:
        """Remove all places of this object. May be called twice."""
        self._is_closed = True
        await self._pool.aclose()
        server, self._server = self._server, None
        if server is not None:
            try:
                await asyncio.to_thread(server.close)
            except RuntimeError:  # the interpreter is ending, which starts no thread any more
                server.close()
        self._store.close()

    async def _connect(self) -> LocalServer:
        async with self._connecting:
            if self._is_closed:
                raise SandboxError("these places are closed")
            if self._server is None or not self._server.is_alive:
                self._server = await LocalServer.start(self._store.folder, _MEMORY_MB)
                server = self._server
                await self._store.trim(lambda layer: server.ask("discard", layer=layer))
            return self._server

    async def _start_build(self, base: LocalImage) -> LocalPlace:
        limits = PlaceLimits(storage_mb=_BUILD_MB)
        settings = _settings(PlaceImage(reference=""), limits)
        settings.update(environment=dict(base.env), workdir="/")
        return await self._start(await self._connect(), base, settings)

    async def _start(
        self, server: LocalServer, image: LocalImage, settings: Mapping[str, Any]
    ) -> LocalPlace:
        place = LocalPlace(
            server, next(self._numbers), layers=image.layers, settings=settings, user=image.user
        )
        async with self._starts:
            try:
                await place.start()
            except BaseException:
                await asyncio.shield(place.aclose())
                raise
        return place


def _settings(image: PlaceImage, limits: PlaceLimits) -> dict[str, Any]:
    """Return the settings of a place; SandboxError if it asks for more than the machine has."""
    total_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    for asked, there, unit in (
        (limits.cpus or 0, os.cpu_count() or 1, "processors"),
        (limits.memory_mb or 0, total_mb, "MB of memory"),
    ):
        if asked > there:
            raise SandboxError(f"the task asks for {asked:g} {unit}, and the machine has {there:g}")
    return {
        "memory_mb": limits.memory_mb or min(_MEMORY_MB, total_mb),
        # In memory: no more than half of it, whatever a task allows.
        "storage_mb": min(limits.storage_mb or _STORAGE_MB, total_mb // 2),
        "shm_mb": _SHM_MB,
        "num_processes": limits.num_processes,
        "cpus": limits.cpus,
    }
