"""Servers as Ray actors: each actor starts the server's process on the machine of its place.

An engine starts a `PlacedServer` like a `LaunchedServer`, and starts it again when it has died. The
server ends with its actor, and the actor with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areal_gym.distributed.cluster import Cluster
from areal_gym.engines.servers.launch import LaunchedServer
from areal_gym.errors import EngineError


class PlacedServer:
    """One server on some machine of the cluster; made by `place_servers`."""

    def __init__(self, cluster: Cluster, index: int, policy: Path, options: dict[str, Any]) -> None:
        import ray

        self.url = ""
        self.log = Path("ray's own")
        # Ray would kill the server's guard before it can end the server.
        place = cluster.options("server", index, RAY_kill_child_processes_on_worker_exit="false")
        # A GPU that the bundle holds is the only one that the server sees.
        actor_class = ray.remote(_Server).options(**place, max_concurrency=8)
        self._make_actor = partial(actor_class.remote, policy, options)
        self._actor: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._last_lines: list[str] = []

    @property
    def is_running(self) -> bool:
        """True while process and actor live; the server may still be starting."""
        return self._serving is not None and not self._serving.done()

    async def reserve(self) -> None:
        """Occupy the place, and choose the URL, which restarts keep, or raise EngineError."""
        import ray

        self._actor = self._make_actor(self.url)
        try:
            self.url, log = await self._actor.place.remote()
        except ray.exceptions.RayError as error:
            raise EngineError(f"a server's actor died at once: {error}") from error
        self.log = Path(log)

    async def start(self) -> None:
        """Return when the server serves, or raise EngineError with the end of its log."""
        import ray

        if self._serving is not None:  # it died: in the same place, with the same URL
            await self.aclose()
        if self._actor is None:
            await self.reserve()
        try:
            problem = await self._actor.start.remote()
        except ray.exceptions.RayError as error:
            raise EngineError(f"the actor of the server at {self.url} died: {error}") from error
        if problem is not None:
            raise problem
        self._serving = asyncio.create_task(self._watch())

    async def aclose(self) -> None:
        """End the server and its actor. Idempotent."""
        import ray

        serving, self._serving = self._serving, None
        actor, self._actor = self._actor, None
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        if actor is None:
            return
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            async with asyncio.timeout(10):
                await actor.aclose.remote()
        ray.kill(actor)  # the server's process ends with it

    def last_lines(self, limit: int = 20) -> list[str]:
        """Return the end of its log, as of its death."""
        return self._last_lines[-limit:]

    async def _watch(self) -> None:
        import ray

        try:
            self._last_lines = await self._actor.wait.remote()
        except ray.exceptions.RayError as error:
            self._last_lines = [str(error)]


async def place_servers(
    cluster: Cluster, policy: Path, num_servers: int, **options: Any
) -> Sequence[PlacedServer]:
    """Make servers, not yet started, in the places of their role; EngineError: an actor died.

    `policy` is a checkpoint directory, the same path on all machines; `options` are further
    arguments of `LaunchedServer`.
    """
    servers = [PlacedServer(cluster, index, policy, options) for index in range(num_servers)]
    await asyncio.gather(*(server.reserve() for server in servers))
    return servers


# ---- in the actor ----------------------------------------------------------------------------


class _Server:
    """One server's process, which ends with the actor's process (see `process_guard`)."""

    def __init__(self, policy: Path, options: dict[str, Any], url: str) -> None:
        import ray

        self._host = ray.util.get_node_ip_address()
        port = int(url.rpartition(":")[2]) if url else None
        self._server = LaunchedServer(policy, host=self._host, port=port, **options)

    async def place(self) -> tuple[str, str]:
        return self._server.url, f"{self._host}:{self._server.log}"

    async def start(self) -> EngineError | None:
        try:
            await self._server.start()
        except EngineError as error:
            return error
        return None

    async def wait(self) -> list[str]:
        while self._server.is_running:
            await asyncio.sleep(0.25)
        return self._server.last_lines()

    async def process_group(self) -> int | None:
        return self._server.process_group

    async def aclose(self) -> None:
        await self._server.aclose()
