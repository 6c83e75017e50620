"""One gateway for each event loop, for all episodes that run on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_gym.gateway.gateway_server import Gateway


@dataclass(slots=True)
class _Kept:
    host: str = "127.0.0.1"
    port: int = 0
    control_key: str | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    gateway: Gateway | None = None
    closing: AsyncGenerator[None, None] | None = None


_shared: dict[asyncio.AbstractEventLoop, _Kept] = {}


@asynccontextmanager
async def gateway_at(
    host: str, port: int, *, control_key: str | None = None
) -> AsyncIterator[None]:
    """Where the running loop's gateway listens, should anybody need it; closed at the end."""
    kept = _of_this_loop()
    kept.host, kept.port, kept.control_key = host, port, control_key
    try:
        yield
    finally:
        gateway, kept.gateway = kept.gateway, None
        if gateway is not None:
            await gateway.aclose()


async def shared_gateway() -> Gateway:
    """The gateway of the running loop, started on first use.

    It is closed at the end of `gateway_at`; without that, when the loop shuts down its asynchronous
    generators, as `asyncio.run` does.

    Raises:
        InfrastructureError: it cannot listen where it should.
    """
    from areal_gym.gateway.gateway_server import Gateway

    kept = _of_this_loop()
    async with kept.starting:
        if kept.gateway is None:
            gateway = Gateway(host=kept.host, port=kept.port, control_key=kept.control_key)
            await gateway.start()
            kept.closing = _close_with_loop(gateway)
            # The first step registers the generator with the loop; it does not suspend.
            with contextlib.suppress(StopIteration):
                kept.closing.__anext__().send(None)
            kept.gateway = gateway
    return kept.gateway


def _of_this_loop() -> _Kept:
    for other in [other for other in _shared if other.is_closed()]:
        del _shared[other]
    return _shared.setdefault(asyncio.get_running_loop(), _Kept())


async def _close_with_loop(gateway: Gateway) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await gateway.aclose()
