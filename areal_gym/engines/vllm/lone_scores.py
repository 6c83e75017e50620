"""Keeps requests for the scores of a prompt apart from all others, for servers that need it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LoneScores:
    """Lets turns of a server run side by side, and each request for scores by itself.

    vLLM 0.32.0 with adapters on a CPU dies of a request for scores that shares a step with any
    other request: it applies the adapters of the sampled rows to all rows of the prompt
    (`PunicaWrapperCPU.add_lora_logits`). The one for GPUs looks up a row's adapter by its place,
    and takes any number of rows. Requests that other processes send to the server are not known.

    Args:
        is_needed: whether the server dies of it; otherwise nothing waits.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._entrance = asyncio.Lock()
        """Held by scores until they have ended, so that turns that begin later wait."""
        self._num_turns = 0
        self._has_ended = asyncio.Event()
        """Set when a turn ends that was the only one."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Send a turn when no request for scores is running or waiting."""
        if not self._is_needed:
            yield
            return
        async with self._entrance:
            self._num_turns += 1
        try:
            yield
        finally:
            self._num_turns -= 1
            if not self._num_turns:
                self._has_ended.set()

    @asynccontextmanager
    async def scores(self) -> AsyncIterator[None]:
        """Send a request for scores when no other request is running."""
        if not self._is_needed:
            yield
            return
        async with self._entrance:
            while self._num_turns:
                self._has_ended.clear()
                await self._has_ended.wait()
            yield
