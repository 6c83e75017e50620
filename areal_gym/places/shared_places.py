"""One backend of places of a kind per event loop, shared by everything that runs on the loop."""

from __future__ import annotations

import json
from typing import Any, cast

from areal_gym.places.base import Places
from areal_gym.places.pool import PlacePool
from areal_gym.plugins import registry
from areal_gym.utils.per_loop import PerLoop

_places: PerLoop[Places] = PerLoop(lambda places: places.aclose())


def shared_pool(id: str = "local", *, spare: int = 0, **kwargs: Any) -> PlacePool:
    """Return the running loop's pool of places, of which `spare` are started ahead.

    Otherwise as `shared_places`.
    """
    key = json.dumps(["pool", id, spare, kwargs], sort_keys=True, default=repr)
    pool = _places.get(
        lambda: PlacePool(cast(Places, registry().make("places", id, **kwargs)), spare=spare), key
    )
    return cast(PlacePool, pool)


def shared_places(id: str = "local", **kwargs: Any) -> Places:
    """Return the running loop's places with that id and those arguments, made on first use.

    They are closed, with all containers, when the loop shuts down its asynchronous generators
    (`asyncio.run` does). Containers of a process that was killed are removed by the next one.

    Raises:
        UnknownIdError: there are no such places.
        ConfigError: they take no such argument.
    """
    key = json.dumps([id, kwargs], sort_keys=True, default=repr)
    return _places.get(lambda: cast(Places, registry().make("places", id, **kwargs)), key)
