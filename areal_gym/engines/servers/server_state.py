"""The state of a server in a pool, and the counters of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from areal_gym.engines.servers.launch import ServerProcess
from areal_gym.engines.servers.replies import version_of
from areal_gym.engines.servers.server_client import ServerClient, ServerFacts


@dataclass(slots=True)
class ServerStats:
    """Counters since the start."""

    num_calls: int = 0
    num_tokens: int = 0
    num_retries: int = 0
    """Requests that were sent again because a server failed."""
    num_moved: int = 0
    """Retries that went to another server."""
    num_continued: int = 0
    """Requests that a publication interrupted."""
    num_servers_lost: int = 0
    num_relaunches: int = 0
    asleep_s: float = 0.0
    """Seconds for which the servers' memory was released for a trainer on the same GPUs."""
    held_s: float = 0.0
    """Seconds that calls waited for publications, summed over calls."""
    publication_s: float = 0.0
    """Seconds for which publications interrupted generation."""


@dataclass(eq=False, slots=True)
class ServerState:
    """The state of one server in the pool."""

    client: ServerClient
    process: ServerProcess | None = None
    """The server's process, if this process started it."""
    facts: ServerFacts | None = None
    """The server's report about itself at the start; None until it has answered."""
    is_serving: bool = False
    is_paused: bool = False
    is_outdated: bool = False
    """Whether the server is back, but needs weights that only the next publication brings."""
    wrong_version: int | None = None
    """A version that the server reports without having its weights."""
    num_sessions: int = 0
    num_in_flight: int = 0
    num_failures: int = 0
    num_relaunches: int = 0
    """This and `num_failures` count since the last success."""
    last_answer_s: float = 0.0
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last request in flight ends."""

    @contextmanager
    def request_in_flight(self) -> Iterator[None]:
        """Count a request while it is in flight."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self.drained.set()

    async def reported_version(self) -> int:
        """Return the version that the server reports; raise EngineError if it reports none."""
        return version_of(await self.client.weight_version())

    async def wake_forgotten(self) -> None:
        """Wake the server if it was lost while it slept."""
        self.facts = self.facts or await self.client.probe()
        await self.client.wake_forgotten(self.facts.model_path)
