"""One process sandbox for each event loop, for all who run on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from areal_gym.sandbox.process import ProcessSandbox

__all__ = ["shared_sandbox"]

_shared: dict[asyncio.AbstractEventLoop, tuple[ProcessSandbox, AsyncGenerator[None, None]]] = {}


def shared_sandbox() -> ProcessSandbox:
    """The process sandbox of the running loop, made on first use.

    It is closed when the loop shuts down its asynchronous generators (`asyncio.run` does), and at
    the latest with this process.
    """
    loop = asyncio.get_running_loop()
    if loop not in _shared:
        for other in [other for other in _shared if other.is_closed()]:
            del _shared[other]
        sandbox = ProcessSandbox()
        closing = _close_with(loop, sandbox)
        # The first step registers the generator with the loop; it does not suspend the caller.
        with contextlib.suppress(StopIteration):
            closing.__anext__().send(None)
        _shared[loop] = (sandbox, closing)
    return _shared[loop][0]


async def _close_with(
    loop: asyncio.AbstractEventLoop, sandbox: ProcessSandbox
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        _shared.pop(loop, None)
        await sandbox.aclose()
