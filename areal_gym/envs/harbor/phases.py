"""Phases of a task's episode, each with a time limit; failures name the task and the phase."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from areal_gym.errors import EnvError, SandboxError

START_S = 180.0
"""The limit of a start, beside the time that building the image may take."""
TRANSFER_S = 120.0
"""The limit of moving files in or out of a place."""


@asynccontextmanager
async def phase(task_id: str, name: str, *, limit_s: float | None = None) -> AsyncIterator[None]:
    """Prefix failures inside with the task and the phase; more than `limit_s` is a SandboxError."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        if limit_s is None:
            raise
        raise SandboxError(f"{task_id}, {name}: not done within {limit_s:g} s") from None
    except (SandboxError, EnvError) as error:
        if error.message.startswith(f"{task_id}, "):  # of a phase inside
            raise
        text = f"{task_id}, {name}: {error.message}"
        raise type(error)(text, hints=error.hints) from error
