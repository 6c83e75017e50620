"""Servers in Ray actors: each actor starts a server process on the machine of its place.

An engine starts a `PlacedServer` as it does a `LaunchedServer`, and restarts it after its death.
The server ends with its actor, and the actor with the run.
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
    """A server on a machine of the cluster; `place_servers` makes it."""

    def __init__(self, cluster: Cluster, index: int, policy: Path, options: dict[str, Any]) -> None:
        import ray

        self.url = ""
        self.log = Path("ray's own")
        # Otherwise Ray would kill the guard process before it can end the server.
        place = cluster.options("server", index, RAY_kill_child_processes_on_worker_exit="false")
        # Ray lets the server see only the GPUs of its bundle.
        actor_class = ray.remote(_Server).options(**place, max_concurrency=8)
        self._make_actor = partial(actor_class.remote, policy, options)
        self._actor: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._last_lines: list[str] = []

    @property
    def is_running(self) -> bool:
        """Whether the process and its actor are alive; the server may still be starting."""
        return self._serving is not None and not self._serving.done()

    async def reserve(self) -> None:
        """Start the actor in its place, which chooses the URL; restarts keep it.

        Raises EngineError if the actor dies.
        """
        import ray

        self._actor = self._make_actor(self.url)
        try:
            self.url, log = await self._actor.place.remote()
        except ray.exceptions.RayError as error:
            raise EngineError(f"a server's actor died at once: {error}") from error
        self.log = Path(log)

    async def start(self) -> None:
        """Start the server and wait until it serves; raise EngineError with the end of its log."""
        import ray

        if self._serving is not None:  # it died, and is restarted with the same place and URL
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
        """Return the last lines of the log, as they were when the server died."""
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
    """Make servers in the cluster's places with the role "server", without starting them.

    Args:
        cluster: the cluster with the places.
        policy: the checkpoint directory, whose path must exist on all machines.
        num_servers: the number of servers.
        **options: further arguments of `LaunchedServer`.

    Raises:
        EngineError: an actor died.
    """
    servers = [PlacedServer(cluster, index, policy, options) for index in range(num_servers)]
    await asyncio.gather(*(server.reserve() for server in servers))
    return servers


# ---- in the actor ----------------------------------------------------------------------------


class _Server:
    """The actor of a server, whose process ends with the actor's (see `process_guard`)."""

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
