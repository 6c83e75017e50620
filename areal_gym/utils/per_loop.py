"""Resources of event loops, which are made on first use and closed with their loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """Stores resources by event loop and key, for all code that runs on the loop.

    A resource is closed when its loop shuts down its asynchronous generators, as `asyncio.run`
    does. Resources are not sent to other processes: a pickled `PerLoop` is empty.

    Args:
        close: closes a resource; it may be a coroutine function of the resource's class.
    """

    def __init__(self, close: Callable[[T], Awaitable[object]]) -> None:
        self._close = close
        self._kept: dict[
            asyncio.AbstractEventLoop, dict[str, tuple[T, AsyncGenerator[None, None]]]
        ] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._close,)

    def get(self, make: Callable[[], T], key: str = "") -> T:
        """Return the running loop's resource, made by `make` on first use."""
        loop = asyncio.get_running_loop()
        if loop not in self._kept:
            for other in [other for other in self._kept if other.is_closed()]:
                del self._kept[other]
        kept = self._kept.setdefault(loop, {})
        if key not in kept:
            resource = make()
            closing = self._close_with_loop(loop, key, resource)
            # The first step registers the generator with the loop; it does not suspend the caller.
            with contextlib.suppress(StopIteration):
                closing.__anext__().send(None)
            kept[key] = (resource, closing)
        return kept[key][0]

    def values(self, loop: asyncio.AbstractEventLoop) -> list[T]:
        """Return the resources of a loop; may be called from any thread."""
        return [resource for resource, _ in tuple(self._kept.get(loop, {}).values())]

    async def _close_with_loop(
        self, loop: asyncio.AbstractEventLoop, key: str, resource: T
    ) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._kept.get(loop, {}).pop(key, None)
            await self._close(resource)
