"""The gateway of an event loop, which all episodes on the loop share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_gym.utils.per_loop import PerLoop

if TYPE_CHECKING:
    from areal_gym.gateway.gateway_server import Gateway


@dataclass(slots=True)
class _LoopGateway:
    """The address of a loop's gateway, and the gateway itself once an episode needs it."""

    host: str = "127.0.0.1"
    port: int = 0
    control_key: str | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    gateway: Gateway | None = None

    async def aclose(self) -> None:
        gateway, self.gateway = self.gateway, None
        if gateway is not None:
            await gateway.aclose()


_gateways: PerLoop[_LoopGateway] = PerLoop(_LoopGateway.aclose)


@asynccontextmanager
async def gateway_at(
    host: str, port: int, *, control_key: str | None = None
) -> AsyncIterator[None]:
    """Set where the running loop's gateway listens if an episode needs it; close it at the end."""
    loop_gateway = _gateways.get(_LoopGateway)
    loop_gateway.host, loop_gateway.port, loop_gateway.control_key = host, port, control_key
    try:
        yield
    finally:
        await loop_gateway.aclose()


async def shared_gateway() -> Gateway:
    """Return the gateway of the running loop, started on first use.

    It is closed at the end of `gateway_at`. Without `gateway_at`, it is closed when the loop shuts
    down its asynchronous generators, as `asyncio.run` does.

    Raises:
        InfrastructureError: it cannot listen at the address.
    """
    from areal_gym.gateway.gateway_server import Gateway

    shared = _gateways.get(_LoopGateway)
    async with shared.starting:
        if shared.gateway is None:
            gateway = Gateway(host=shared.host, port=shared.port, control_key=shared.control_key)
            await gateway.start()
            shared.gateway = gateway
    return shared.gateway
