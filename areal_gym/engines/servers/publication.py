"""Interrupts generation while the servers of a pool take new weights, or while they sleep.

Servers sleep for a trainer that uses the same GPUs (`sleep`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from areal_gym.engines.servers.server_client import CACHE, WEIGHTS, ServerClient
from areal_gym.engines.servers.server_pool import ServerPool
from areal_gym.engines.servers.server_state import ServerState
from areal_gym.errors import EngineError, EngineUnreachableError

_DRAIN_S = 60.0
"""A server that has not returned its requests after this many seconds is lost."""


class PublicationGate:
    """Holds requests back while weights change.

    Args:
        pool: the servers.
        may_set_aside: whether servers may hold requests instead of aborting them.
    """

    def __init__(self, pool: ServerPool, *, may_set_aside: bool) -> None:
        self._pool = pool
        self._may_set_aside = may_set_aside
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._paused_states: list[ServerState] = []
        """The servers that a publication has paused, or that sleep."""
        self._refusals: list[EngineError] = []
        """Errors of the latest comparison of log-probabilities, one per refused server."""
        self._since_s = 0.0
        """The time when the servers fell asleep."""

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent."""
        return self._is_open.is_set()

    async def wait(self) -> None:
        """Wait until no publication is in progress."""
        if not self.is_open:
            clock = asyncio.get_running_loop().time
            since_s = clock()
            await self._is_open.wait()
            self._pool.stats.held_s += clock() - since_s

    @asynccontextmanager
    async def updating(
        self, version: int, *, must_abort: bool
    ) -> AsyncIterator[Sequence[ServerClient]]:
        """Interrupt generation, yield the servers, and resume those that report `version`.

        Sleeping servers allocate their weights' memory again, and continue only at `wake_up`.

        Raises:
            EngineError: no server took the new weights.
            EngineUnreachableError: no server answered within the grace period.
        """
        pool = self._pool
        self._refusals = []
        async with self._weights_in_memory() if pool.is_asleep else self._paused(must_abort):
            published: int | None = None
            try:
                yield [state.client for state in self._paused_states]
                published = version
            finally:
                await _admit(pool, self._paused_states, published)
        if pool.policy_version != version:
            raise EngineError(f"no server reports version {version} after its publication")
        if self._refusals and not pool.serving:
            raise self._refusals[0]

    @asynccontextmanager
    async def _paused(self, must_abort: bool) -> AsyncIterator[None]:
        pool, clock = self._pool, asyncio.get_running_loop().time
        async with pool.lock:
            states = await pool.reachable()
            since_s = clock()
            self._is_open.clear()
            try:
                pauses = (
                    _pause(pool, state, self._may_set_aside, must_abort=must_abort)
                    for state in states
                )
                states = list(itertools.compress(states, await asyncio.gather(*pauses)))
                if not states:
                    raise EngineUnreachableError("every server was lost at the publication")
                self._paused_states = states
                try:
                    yield
                finally:
                    await asyncio.gather(
                        *(_unpause(pool, state) for state in states if state.is_paused)
                    )
                    await self._verify(states)
            finally:
                self._is_open.set()
                pool.stats.publication_s += clock() - since_s

    async def _verify(self, states: Sequence[ServerState]) -> None:
        """Compare the servers that continue with the trainer, before new requests are sent."""
        pool = self._pool
        checks = (pool.verify(state) for state in states if state.is_serving)
        self._refusals = [error for error in await asyncio.gather(*checks) if error is not None]

    # ---- colocation ---------------------------------------------------------------------------

    async def sleep(self, *, keeps_weights: bool) -> None:
        """Let the servers release their memory; requests wait until `wake_up`.

        With `keeps_weights`, only the cache's memory is released.
        """
        pool = self._pool
        await pool.lock.acquire()
        self._is_open.clear()
        pool.is_asleep = True
        self._since_s = asyncio.get_running_loop().time()
        tags = [CACHE] if keeps_weights else [CACHE, WEIGHTS]

        async def put_to_sleep(state: ServerState) -> None:
            if not self._may_set_aside:
                async with asyncio.timeout(_DRAIN_S):
                    await _drain(state, spares_others=False)
            await state.client.fall_asleep(tags)

        self._paused_states = await self._on_each(pool.serving, put_to_sleep)

    async def wake_up(self) -> None:
        """Let the servers allocate all memory again, and continue interrupted requests.

        Without a publication since they fell asleep, they continue with their old weights, which
        they have kept or load from disk. If those are not on disk, the server is lost until the
        next publication. Does nothing if the servers are awake.
        """
        pool = self._pool
        if not pool.is_asleep:
            return

        async def wake(state: ServerState) -> None:
            if not state.is_serving:
                raise EngineError(f"{state.client.url} was lost while it slept")
            if await state.client.take_back(WEIGHTS):
                state.is_outdated = not await self._reload(state)
            elif await state.reported_version() != pool.policy_version:  # its name says "asleep"
                await state.client.set_version(str(pool.policy_version))
            await state.client.take_back(CACHE)
            await state.client.resume()
            if state.is_outdated:  # tokens sampled now would have a wrong version
                raise EngineError(f"{state.client.url} needs the weights of the next publication")

        try:
            await self._on_each(self._paused_states, wake)
            await self._verify(self._paused_states)
        finally:
            pool.is_asleep = False
            pool.stats.asleep_s += asyncio.get_running_loop().time() - self._since_s
            self._is_open.set()
            pool.lock.release()

    async def _reload(self, state: ServerState) -> bool:
        """Load the policy's version on a server that released its weights and got none since.

        Returns whether it could: weights that are on no disk come only with the next publication.
        """
        pool, client = self._pool, state.client
        if pool.policy_version == 0 and state.facts is not None:
            await client.reload(state.facts.model_path, "0")
            return True
        return await pool.give_newest(client)

    @asynccontextmanager
    async def _weights_in_memory(self) -> AsyncIterator[None]:
        """Allocate the weights' memory again; the servers are paused already, and stay so."""

        async def take(state: ServerState) -> None:
            await state.client.take_back(WEIGHTS)

        self._paused_states = await self._on_each(self._paused_states, take)
        if not self._paused_states:
            raise EngineUnreachableError("every server was lost while it slept")
        yield

    async def _on_each(
        self, states: Sequence[ServerState], act: Callable[[ServerState], Awaitable[None]]
    ) -> list[ServerState]:
        """Return the servers for which `act` succeeded; the others are lost."""

        async def one(state: ServerState) -> bool:
            try:
                await act(state)
            except (EngineError, TimeoutError):
                self._pool.lose(state)
                return False
            return True

        return list(itertools.compress(states, await asyncio.gather(*map(one, states))))


async def _admit(pool: ServerPool, states: Sequence[ServerState], published: int | None) -> None:
    """Admit the servers that report the right version; the others are lost."""
    reports = await asyncio.gather(
        *(state.reported_version() for state in states), return_exceptions=True
    )
    if published in reports and published is not None:
        pool.policy_version = published
    for state, report in zip(states, reports, strict=True):
        if report == pool.policy_version:
            pool.admit(state)
        else:
            pool.lose(state)


async def _pause(
    pool: ServerPool, state: ServerState, may_set_aside: bool, *, must_abort: bool
) -> bool:
    """Stop sampling on the server; return False if it was lost instead."""
    try:
        if not state.is_serving:
            await state.wake_forgotten()
        if may_set_aside and not must_abort:
            await state.client.set_aside()
            state.is_paused = True
        elif state.client.pauses_to_abort and not must_abort:
            await state.client.abort_and_pause()
            state.is_paused = True
        else:
            async with asyncio.timeout(_DRAIN_S):
                await _drain(state, spares_others=must_abort)
    except (EngineError, TimeoutError):
        pool.lose(state)
        return False
    return True


async def _drain(state: ServerState, *, spares_others: bool) -> None:
    """Abort until every request is back, because one may still be on its way to the server.

    With `spares_others`, requests of other processes continue if none of ours is in flight.
    """
    wait_s = 0.05
    while state.num_in_flight or not spares_others:
        state.drained.clear()
        await state.client.abort_all()
        if not state.num_in_flight:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(state.drained.wait(), wait_s)
        wait_s = min(2 * wait_s, 1.0)


async def _unpause(pool: ServerPool, state: ServerState) -> None:
    state.is_paused = False
    try:
        await state.client.resume()
    except EngineError:
        pool.lose(state)
