"""The base of sandboxes that fork a cell for each snippet: slots, retries, sessions."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar, Self

from areal_gym.errors import SandboxError
from areal_gym.sandbox.base import Sandbox, SandboxLimits, SandboxResult
from areal_gym.sandbox.cells import Cell
from areal_gym.sandbox.zygotes import Zygote


class ForkingSandbox(Sandbox, ABC):
    """Runs snippets in cells of fork servers. Subclasses decide where the servers run.

    An object belongs to one event loop; `shared_sandbox` keeps one per loop.
    """

    backend: ClassVar[str]

    def __init__(
        self,
        *,
        num_workers: int | None,
        limits: SandboxLimits | None,
        modules: Sequence[str],
        max_sessions: int = sys.maxsize,
    ) -> None:
        self.num_workers = num_workers or min(8, os.cpu_count() or 1)
        self.limits = limits or SandboxLimits()
        self._modules = tuple(modules)
        self._mentions = re.compile(r"\b(?:" + "|".join(map(re.escape, modules)) + r")\b")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(self.num_workers)
        self._places = asyncio.Semaphore(max_sessions)
        self._is_closed = False
        self.num_calls = 0
        """Calls in progress, including those that wait for a worker."""

    @abstractmethod
    async def _lease(self, code: str) -> Zygote:
        """Return a living fork server for `code`; a `_release` follows every lease."""

    @abstractmethod
    def _release(self, zygote: Zygote) -> None:
        """Take back a fork server whose cell has ended or was abandoned."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop the fork servers of a closed loop."""

    @abstractmethod
    def zygotes(self) -> list[Zygote]:
        """Return the current fork servers."""

    async def run(self, code: str, *, limits: SandboxLimits | None = None) -> SandboxResult:
        """Execute `code` in a fresh interpreter.

        Raises:
            SandboxError: the sandbox itself failed, twice.
        """
        with self.counted():
            async with self._slots:
                try:
                    return await self._run_once(code, self._checked(limits))
                except SandboxError:
                    if self._is_closed:
                        raise
                    return await self._run_once(code, self._checked(limits), is_retry=True)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one call."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    async def _run_once(
        self, code: str, limits: SandboxLimits, *, is_retry: bool = False
    ) -> SandboxResult:
        zygote = await self._lease(code)
        try:
            cell = zygote.take(is_retry=is_retry)
            zygote.bound(cell, limits.memory_mb)
            return await cell.execute(code, limits, is_fresh=True)
        finally:
            self._release(zygote)

    async def session(self) -> ForkingSession:
        """Open a new persistent interpreter; its process starts with the first call."""
        return ForkingSession(self)

    async def __aenter__(self) -> Self:
        await self.report()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @property
    def is_started(self) -> bool:
        """Whether it has run a call or made a report."""
        return self._loop is not None

    def _checked(self, limits: SandboxLimits | None) -> SandboxLimits:
        """Return the limits of a call; a backend may refuse some."""
        return limits or self.limits

    def _claim_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise SandboxError("the sandbox is closed")
        if self._loop is None or self._loop.is_closed():
            self._forget()
            self._loop = loop
        elif self._loop is not loop:
            message = "this sandbox belongs to another event loop"
            raise SandboxError(message, hints=("use shared_sandbox(): one for each loop",))

    def _needs_modules(self, code: str) -> bool:
        return bool(self._modules) and self._mentions.search(code) is not None


class ForkingSession:
    """A persistent interpreter of one sandbox. Its calls run one after the other.

    Memory and time limits apply to each call. A call after a time-out or crash starts a new
    interpreter: names defined before are gone. If the fork server is lost through no fault of a
    snippet, the current or next call raises SandboxError, and the one after it starts a new one.
    """

    def __init__(self, sandbox: ForkingSandbox) -> None:
        self._sandbox = sandbox
        self._current: tuple[Zygote, Cell] | None = None
        self._has_names = False  # whether a call has run in the current interpreter
        self._turn = asyncio.Lock()

    async def run(self, code: str, *, limits: SandboxLimits | None = None) -> SandboxResult:
        """Execute `code` with the names of earlier calls.

        Raises:
            SandboxError: the sandbox itself failed, twice.
        """
        sandbox = self._sandbox
        with sandbox.counted():
            async with self._turn:
                try:
                    return await self._run_once(code, sandbox._checked(limits))
                except SandboxError:
                    if sandbox._is_closed:
                        raise
                    if self._has_lost_names():
                        self._give_back()
                        raise
                    return await self._run_once(code, sandbox._checked(limits), is_retry=True)

    def _has_lost_names(self) -> bool:
        """Return whether names of earlier calls were lost through no fault of a snippet."""
        return self._has_names and self._current is not None and self._current[1].was_lost

    async def _run_once(
        self, code: str, limits: SandboxLimits, *, is_retry: bool = False
    ) -> SandboxResult:
        # Sessions wait for a place before a slot, so that they do not block running sessions.
        zygote, cell = await self._cell(code, is_retry=is_retry)
        async with self._sandbox._slots:
            zygote.bound(cell, limits.memory_mb)
            result = await cell.execute(code, limits, is_fresh=False)
        self._has_names = True
        return result

    async def _cell(self, code: str, *, is_retry: bool) -> tuple[Zygote, Cell]:
        if self._current is not None:
            if self._current[1].is_alive:
                return self._current
            if self._has_lost_names():
                raise SandboxError("the session's interpreter was lost through no fault of its own")
            self._give_back()
        sandbox = self._sandbox
        with ExitStack() as undo:
            await sandbox._places.acquire()
            undo.callback(sandbox._places.release)
            zygote = await sandbox._lease(code)
            undo.callback(sandbox._release, zygote)
            self._current = (zygote, zygote.take(is_retry=is_retry))
            undo.pop_all()
        zygote.refill()
        return self._current

    def _give_back(self) -> None:
        previous, self._current = self._current, None
        self._has_names = False
        if previous is not None:
            self._sandbox._release(previous[0])
            self._sandbox._places.release()

    async def aclose(self) -> None:
        """End the interpreter and everything it started. Idempotent."""
        if self._current is not None:
            try:
                await self._current[1].aclose()
            finally:
                self._give_back()
