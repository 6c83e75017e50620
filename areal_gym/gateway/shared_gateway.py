"""One gateway per event loop, shared by all episodes that run on the loop."""

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
    kept = _gateways.get(_LoopGateway)
    kept.host, kept.port, kept.control_key = host, port, control_key
    try:
        yield
    finally:
        await kept.aclose()


async def shared_gateway() -> Gateway:
    """Return the gateway of the running loop, started on first use.

    It is closed at the end of `gateway_at`; without that, when the loop shuts down its asynchronous
    generators, as `asyncio.run` does.

    Raises:
        InfrastructureError: it cannot listen at the address.
    """
    from areal_gym.gateway.gateway_server import Gateway

    kept = _gateways.get(_LoopGateway)
    async with kept.starting:
        if kept.gateway is None:
            gateway = Gateway(host=kept.host, port=kept.port, control_key=kept.control_key)
            await gateway.start()
            kept.gateway = gateway
    return kept.gateway
