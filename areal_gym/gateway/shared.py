"""One gateway for each event loop, for all episodes that run on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from areal_gym.gateway.server import Gateway

__all__ = ["shared_gateway"]

_shared: dict[asyncio.AbstractEventLoop, tuple[Gateway, AsyncGenerator[None, None]]] = {}
_starting: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}


async def shared_gateway(*, host: str = "127.0.0.1", port: int = 0) -> Gateway:
    """The gateway of the running loop, started on first use; the first call says where.

    It is closed when the loop shuts down its asynchronous generators, as `asyncio.run` does.

    Raises:
        InfrastructureError: it cannot listen there.
    """
    loop = asyncio.get_running_loop()
    for other in [other for other in _starting if other.is_closed()]:
        del _starting[other]
        _shared.pop(other, None)
    async with _starting.setdefault(loop, asyncio.Lock()):
        if loop not in _shared:
            gateway = Gateway(host=host, port=port)
            await gateway.start()
            closing = _close_with(loop, gateway)
            # The first step registers the generator with the loop; it does not suspend.
            with contextlib.suppress(StopIteration):
                closing.__anext__().send(None)
            _shared[loop] = (gateway, closing)
    return _shared[loop][0]


async def _close_with(
    loop: asyncio.AbstractEventLoop, gateway: Gateway
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        _shared.pop(loop, None)
        await gateway.aclose()
