"""The process sandbox: a fork server behind walls that the kernel enforces."""

from __future__ import annotations

import asyncio
import os
import re
import weakref
from collections.abc import Collection, Sequence
from typing import Self

from areal_gym.errors import SandboxError
from areal_gym.sandbox.base import SandboxLimits, SandboxResult
from areal_gym.sandbox.cells import Cell
from areal_gym.sandbox.zygotes import Zygote

__all__ = ["ProcessSandbox", "ProcessSession"]


class ProcessSandbox:
    """Runs untrusted Python in forked processes with limits enforced by the kernel.

    A clean interpreter with an empty environment shuts itself in (namespaces, a private root
    directory, Landlock, seccomp: whatever this kernel and user allow, see `protections`) and then
    forks a cell for each call: its own uid, processes, temporary directory and limits, no network,
    no descriptors but its own. At the end of a call the cell and all that it started are killed.

    Not covered: bugs of the kernel itself; timing and cache side channels; the sum of memory over
    the processes of one snippet (the limit is per process, times `num_processes`).

    One object belongs to one event loop; `shared_sandbox` keeps one for each.

    Args:
        num_workers: snippets that execute at a time; more wait in order. Default: one for each
            processor, at most 8.
        limits: for calls that name none.
        modules: imported ahead for snippets that mention one of them; such snippets share a second
            fork server, started when the first of them comes.
        without: names of `protections` to leave out ("namespaces" for all of those).
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        limits: SandboxLimits | None = None,
        modules: Sequence[str] = ("numpy", "sympy"),
        without: Collection[str] = (),
    ) -> None:
        self.num_workers = num_workers or min(8, os.cpu_count() or 1)
        self.limits = limits or SandboxLimits()
        self._modules = tuple(modules)
        self._without = tuple(without)
        self._mentions = re.compile(r"\b(?:" + "|".join(map(re.escape, modules)) + r")\b")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(self.num_workers)
        self._starting = asyncio.Lock()
        self._zygotes: dict[bool, Zygote] = {}
        # Also at exit of this process, when nobody closed us.
        self._finalizer = weakref.finalize(self, _close_all, self._zygotes)
        self._is_closed = False

    async def run(self, code: str, *, limits: SandboxLimits | None = None) -> SandboxResult:
        """Execute `code` in a fresh interpreter.

        Raises:
            SandboxError: the sandbox itself failed, twice.
        """
        async with self._slots:
            try:
                return await self._run_once(code, limits or self.limits)
            except SandboxError:
                if self._is_closed:
                    raise
                return await self._run_once(code, limits or self.limits, is_retry=True)

    async def _run_once(
        self, code: str, limits: SandboxLimits, *, is_retry: bool = False
    ) -> SandboxResult:
        zygote = await self._zygote_for(code)
        # What ended a waiting cell may have ended the others, and we not have heard of it yet.
        cell = zygote.spawn() if is_retry else zygote.take()
        try:
            return await cell.execute(code, limits, is_fresh=True)
        finally:
            zygote.refill()

    async def session(self) -> ProcessSession:
        """A new persistent interpreter; its process starts with the first call."""
        return ProcessSession(self)

    async def protections(self) -> tuple[str, ...]:
        """What is enforced here, by name; what this kernel or user refuses is not in it."""
        return (await self._zygote_for("")).protections

    async def aclose(self) -> None:
        """End every worker. Idempotent."""
        self._is_closed = True
        _close_all(self._zygotes)

    async def __aenter__(self) -> Self:
        await self._zygote_for("")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _zygote_for(self, code: str) -> Zygote:
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise SandboxError("the sandbox is closed")
        if self._loop is None or self._loop.is_closed():
            _close_all(self._zygotes)
            self._loop = loop
        elif self._loop is not loop:
            message = "this sandbox belongs to another event loop"
            raise SandboxError(message, hints=("use shared_sandbox(): one for each loop",))
        needs_modules = bool(self._modules) and self._mentions.search(code) is not None
        async with self._starting:
            zygote = self._zygotes.get(needs_modules)
            if zygote is None or not zygote.is_alive:
                zygote = await Zygote.start(
                    modules=self._modules if needs_modules else (),
                    without=self._without,
                    num_warm=self.num_workers,
                )
                self._zygotes[needs_modules] = zygote
                if not self._without:
                    _require_walls(zygote.protections)
        return zygote


class ProcessSession:
    """A persistent interpreter of one `ProcessSandbox`. Its calls run one after another.

    Limits of memory and time hold for each call. After a time-out or a crash the next call starts
    afresh: names defined before are gone.
    """

    def __init__(self, sandbox: ProcessSandbox) -> None:
        self._sandbox = sandbox
        self._cell: Cell | None = None
        self._turn = asyncio.Lock()

    async def run(self, code: str, *, limits: SandboxLimits | None = None) -> SandboxResult:
        """Execute `code`; names of earlier calls are there.

        Raises:
            SandboxError: the sandbox itself failed, twice.
        """
        sandbox = self._sandbox
        async with self._turn, sandbox._slots:
            try:
                return await self._run_once(code, limits or sandbox.limits)
            except SandboxError:
                if sandbox._is_closed:
                    raise
                return await self._run_once(code, limits or sandbox.limits, is_retry=True)

    async def _run_once(
        self, code: str, limits: SandboxLimits, *, is_retry: bool = False
    ) -> SandboxResult:
        if self._cell is None or not self._cell.is_alive:
            zygote = await self._sandbox._zygote_for(code)
            self._cell = zygote.spawn() if is_retry else zygote.take()
            zygote.refill()
        return await self._cell.execute(code, limits, is_fresh=False)

    async def aclose(self) -> None:
        """End the interpreter and everything it started. Idempotent."""
        cell, self._cell = self._cell, None
        if cell is not None:
            await cell.aclose()


def _require_walls(protections: Collection[str]) -> None:
    """Refuse to run where nothing keeps a snippet from this user's files and processes."""
    for what, walls in (
        ("files", ("private root", "landlock")),
        ("processes", ("pid namespace", "seccomp")),
        ("network", ("network namespace", "seccomp")),
    ):
        if not set(walls) & set(protections):
            raise SandboxError(
                f"nothing on this machine would keep a snippet from the {what} of this user",
                hints=(f"it needs one of: {', '.join(walls)}", "Linux 5.13 has them for any user"),
            )


def _close_all(zygotes: dict[bool, Zygote]) -> None:
    for zygote in zygotes.values():
        zygote.close()
    zygotes.clear()
