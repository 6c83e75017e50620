"""A pool in front of a backend: images and places that will be needed next are made ahead.

A place that was started ahead is used once, by the episode that asks for its image and limits, and
removed with it: no place goes back to the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Protocol

from areal_gym.places.base import Place, PlaceImage, PlaceLimits, Places


class PlacePool:
    """Starts places of a backend, which it owns.

    Args:
        places: the backend.
        spare: how many started places wait at most, of all images together.
    """

    def __init__(self, places: Places, *, spare: int = 0) -> None:
        self.places = places
        self._num_spare = spare
        # Starts under way or done, by image and limits; the longest expected first.
        self._spares: OrderedDict[str, deque[asyncio.Task[Place]]] = OrderedDict()
        self._tasks: set[asyncio.Task[object]] = set()
        self._builds: dict[str, asyncio.Task[object]] = {}
        self._is_closed = False

    async def start(self, image: PlaceImage, limits: PlaceLimits) -> Place:
        """Return a started place, which may have waited; raises what the backend raises."""
        key = _key(image, limits)
        while waiting := self._spares.get(key):
            starting = waiting.popleft()
            if not waiting:
                del self._spares[key]
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._remove(starting)
                raise
            except Exception:
                break  # this start fails in its own way
        return await self.places.start(image, limits)

    async def build(self, image: PlaceImage) -> str:
        """Build the image of later places, if need be; return its key."""
        return await self.places.build(image)

    def expect(self, image: PlaceImage, limits: PlaceLimits) -> None:
        """Start a place that an episode will ask for soon, if the pool is not full.

        A place that nothing asked for makes room for one that is expected later.
        """
        if self._is_closed or not self._num_spare:
            return
        while sum(map(len, self._spares.values())) >= self._num_spare:
            oldest = next(iter(self._spares))
            if oldest == _key(image, limits):
                return
            self._remove(self._spares[oldest].popleft())
            if not self._spares[oldest]:
                del self._spares[oldest]
        starting = asyncio.ensure_future(self.places.start(image, limits))
        starting.add_done_callback(_read_exception)
        self._spares.setdefault(_key(image, limits), deque()).append(starting)

    def build_ahead(self, images: Iterable[PlaceImage]) -> None:
        """Build images in this order beside the episodes; an image is asked for once.

        What cannot be built is an error of the episodes that need it.
        """
        for image in images:
            key = repr(image)
            if key not in self._builds and not self._is_closed:
                build = asyncio.ensure_future(self.build(image))
                build.add_done_callback(_read_exception)
                self._builds[key] = build

    async def aclose(self) -> None:
        """Remove the places that wait, and close the backend. May be called twice."""
        self._is_closed = True
        for build in self._builds.values():
            build.cancel()
        for waiting in self._spares.values():
            for starting in waiting:
                self._remove(starting)
        self._spares.clear()
        await asyncio.gather(*self._builds.values(), *self._tasks, return_exceptions=True)
        await self.places.aclose()

    def _remove(self, starting: asyncio.Task[Place]) -> None:
        async def remove() -> None:
            starting.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await (await starting).aclose()

        task: asyncio.Task[object] = asyncio.ensure_future(remove())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class StartsAnew(Protocol):
    """A backend that keeps a pool of its own."""

    async def start_anew(self, image: PlaceImage, limits: PlaceLimits) -> Place:
        """Start a place now, whatever waits."""

    async def build(self, image: PlaceImage) -> str:
        """Build an image, if need be."""


class StartedAnew:
    """A backend as its own pool sees it: starts places, and does not end with the pool."""

    def __init__(self, places: StartsAnew) -> None:
        self._places = places

    async def start(self, image: PlaceImage, limits: PlaceLimits) -> Place:
        """Start a place now."""
        return await self._places.start_anew(image, limits)

    async def build(self, image: PlaceImage) -> str:
        """Build an image, if need be."""
        return await self._places.build(image)

    async def aclose(self) -> None:
        """Do nothing: the backend closes itself."""


def _key(image: PlaceImage, limits: PlaceLimits) -> str:
    return f"{image!r} {limits!r}"


def _read_exception(task: asyncio.Task[object] | asyncio.Task[Place]) -> None:
    if not task.cancelled():
        task.exception()  # raised again where it is needed
