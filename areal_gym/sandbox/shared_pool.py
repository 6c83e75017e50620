"""One sandbox of a kind for each event loop, for all who run on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any, cast

from areal_gym.plugins import registry
from areal_gym.sandbox.base import Sandbox, SandboxReport
from areal_gym.sandbox.forking import ForkingSandbox

_Kept = tuple[Sandbox, AsyncGenerator[None, None]]
_shared: dict[asyncio.AbstractEventLoop, dict[str, _Kept]] = {}


def shared_sandbox(id: str = "process", **kwargs: Any) -> Sandbox:
    """The sandbox of the running loop by that id and those arguments, made on first use.

    It is closed when the loop shuts down its asynchronous generators (`asyncio.run` does), and at
    the latest with this process.

    Raises:
        UnknownIdError: nobody registered such a sandbox.
        ConfigError: it takes no such argument.
    """
    loop = asyncio.get_running_loop()
    kept = _shared.get(loop)
    if kept is None:
        for other in [other for other in _shared if other.is_closed()]:
            del _shared[other]
        kept = _shared[loop] = {}
    key = json.dumps([id, kwargs], sort_keys=True, default=repr)
    if key not in kept:
        sandbox = cast(Sandbox, registry().make("sandboxes", id, **kwargs))
        closing = _close_with(loop, key, sandbox)
        # The first step registers the generator with the loop; it does not suspend the caller.
        with contextlib.suppress(StopIteration):
            closing.__anext__().send(None)
        kept[key] = (sandbox, closing)
    return kept[key][0]


def shared_calls(loop: asyncio.AbstractEventLoop) -> int:
    """How many calls the shared sandboxes of a loop have not answered yet; from any thread."""
    kept = _shared.get(loop, {})
    return sum(s.num_calls for s, _ in tuple(kept.values()) if isinstance(s, ForkingSandbox))


async def reports_of(sandboxes: Iterable[Any]) -> list[SandboxReport]:
    """What is active in sandboxes, each given by its id (the running loop's) or as an object.

    Raises:
        SandboxError: one does not start, or protects less than it must.
    """
    made = [shared_sandbox(each) if isinstance(each, str) else each for each in sandboxes]
    return [await sandbox.report() for sandbox in {id(one): one for one in made}.values()]


async def shared_reports() -> list[SandboxReport]:
    """What is active in the shared sandboxes of the running loop that have run anything."""
    kept = _shared.get(asyncio.get_running_loop(), {})
    used = [s for s, _ in kept.values() if not isinstance(s, ForkingSandbox) or s.is_started]
    return [await sandbox.report() for sandbox in used]


async def _close_with(
    loop: asyncio.AbstractEventLoop, key: str, sandbox: Sandbox
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        _shared.get(loop, {}).pop(key, None)
        await sandbox.aclose()
