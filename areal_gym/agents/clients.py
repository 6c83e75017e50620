"""HTTP clients that live as long as the event loop they were made on.

Making one reads the machine's certificates, which takes 20 ms: too much for each episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any


class OnePerLoop:
    """One client for each loop, closed when the loop shuts down its asynchronous generators."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[None, None]]
        ] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # agents travel to rollout workers; connections do not

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def get(self, make: Callable[[], Any]) -> Any:
        """The client of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._kept:
            client = make()
            closing = _close_with_loop(client)
            # The first step registers the generator with the loop; it does not suspend.
            with contextlib.suppress(StopIteration):
                closing.__anext__().send(None)
            self._kept[loop] = (client, closing)
        return self._kept[loop][0]


async def _close_with_loop(client: Any) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.close()
