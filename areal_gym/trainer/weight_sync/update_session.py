"""Update sessions around weights that do not come from a checkpoint directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from areal_gym.engines.base import WeightServer
from areal_gym.trainer.weight_sync.base import on_all

_CONTROL_S = 120.0
BROKEN_WEIGHTS = "broken"
"""The version that a server reports after a partial transfer, so that it does not serve."""


@asynccontextmanager
async def update_session(servers: Sequence[WeightServer]) -> AsyncIterator[list[WeightServer]]:
    """Begin and end an update on every server that requires it (SGLang 0.5.21 and later).

    Yields the servers where it began. Failed servers are removed from the list; the engine notices
    that they do not report the new version.

    Raises:
        EngineError: no server is left.
    """

    async def post(server: WeightServer, route: str) -> None:
        if server.needs_update_session:
            await server.post(route, {}, timeout_s=_CONTROL_S)

    alive = await on_all(servers, lambda server: post(server, "/begin_weight_update"))
    try:
        yield alive
    except BaseException:
        # Some of the new weights are loaded, under the name of the old ones.
        body = {"new_version": BROKEN_WEIGHTS, "abort_all_requests": False}
        for route, content in (("/end_weight_update", {}), ("/update_weight_version", body)):
            await asyncio.gather(
                *(server.post(route, content, timeout_s=_CONTROL_S) for server in alive),
                return_exceptions=True,  # the first error is the one to report
            )
        raise
    await on_all(alive, lambda server: post(server, "/end_weight_update"))
