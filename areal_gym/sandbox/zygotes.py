"""The parent's end of a fork server: order cells, hear of their ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, Self

from areal_gym.errors import SandboxError
from areal_gym.sandbox.calls import Exit
from areal_gym.sandbox.cells import Cell, CellControl

_START_S = 60.0
_HOLD_AFTER_S = 0.05
"""Sessions without a call for so long are stopped; a call that follows at once does not wait."""
_NUMBERS_PER_ORDER = 200


class Server(Protocol):
    """The process of a fork server, wherever it runs."""

    @property
    def pid(self) -> int:
        """Its number on this machine."""
        ...

    @property
    def scratch(self) -> str:
        """The directory of its cells' directories, seen from here; not there in a private root."""
        ...

    def complaint(self) -> str:
        """Why it did not start; called when it is gone or going."""
        ...

    def end(self) -> None:
        """See to its end, and let go of what it held; called when its socket is closed."""
        ...


class Zygote:
    """One fork server and the cells that it has forked. Belongs to the running loop.

    Args:
        control: message socket to the server.
        server: its process.
        num_warm: cells that wait for a snippet, so that it need not wait for them.
        is_exclusive: one cell at a time: none waits beside one that is in use.
    """

    def __init__(
        self, control: socket.socket, server: Server, *, num_warm: int, is_exclusive: bool
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = os.getpid()
        self.server = server
        self._num_warm = num_warm
        self._is_exclusive = is_exclusive
        self._warm: deque[Cell] = deque()
        self._cells: dict[int, Cell] = {}
        self._idle: set[int] = set()
        """Sessions that will be held when `_holding` fires."""
        self._held: set[int] = set()
        self._holding: asyncio.TimerHandle | None = None
        self._last_number = 0
        self._memory_mb = 0
        """What the processes of a new cell may hold together, where the kernel counts that."""
        self._started = self._loop.create_future()
        self._control = control
        control.setblocking(False)
        self.protections: tuple[str, ...] = ()
        self.is_alive = True
        self._loop.add_reader(control, self._on_event)

    @classmethod
    async def start(
        cls, control: socket.socket, server: Server, *, num_warm: int, is_exclusive: bool = False
    ) -> Self:
        """Wait until the server answers, and order its first cells.

        Raises:
            SandboxError: it did not start.
        """
        zygote = cls(control, server, num_warm=num_warm, is_exclusive=is_exclusive)
        try:
            async with asyncio.timeout(_START_S):
                await zygote._started
        except TimeoutError:
            zygote.close()
            message = f"the sandbox's fork server did not start within {_START_S:g} s"
            raise SandboxError(message) from None
        except BaseException:
            zygote.close()
            raise
        zygote.refill()
        return zygote

    def take(self, *, is_retry: bool = False) -> Cell:
        """A cell that nobody has used: a waiting one, or a new one.

        Args:
            is_retry: another cell was just lost. What ended it may have ended the waiting ones,
                unheard of as yet.
        """
        while self._warm and (self._is_exclusive or not is_retry):
            cell = self._warm.popleft()
            if cell.is_alive:
                return cell
        return self.spawn()

    def refill(self) -> None:
        """Order new cells until enough wait."""
        if self._is_exclusive and self._cells:
            return
        while self.is_alive and len(self._warm) < self._num_warm:
            self._warm.append(self.spawn())

    def spawn(self) -> Cell:
        """Order a new cell. It may still be starting when this returns.

        Raises:
            SandboxError: the fork server is gone, or this process has no descriptors left.
        """
        if not self.is_alive:
            raise SandboxError("the sandbox's fork server is gone")
        self._last_number += 1
        number = self._last_number
        try:
            channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stdout, their_stdout = os.pipe()
            stderr, their_stderr = os.pipe()
        except OSError as error:
            raise SandboxError(f"no descriptors for a sandbox process: {error}") from error
        channel.setblocking(False)
        os.set_blocking(stdout, False)
        os.set_blocking(stderr, False)
        control = CellControl(
            kill=partial(self._order, "kill", [number]),
            hold_soon=partial(self._hold_soon, number),
            resume=partial(self._resume, number),
            give_up=self.close,
        )
        cell = Cell(channel, stdout, stderr, control)
        cell.memory_mb = self._memory_mb
        self._cells[number] = cell
        self._order("spawn", [number], (theirs.fileno(), their_stdout, their_stderr))
        theirs.close()
        os.close(their_stdout)
        os.close(their_stderr)
        return cell

    def _hold_soon(self, number: int) -> None:
        self._idle.add(number)
        if self._holding is None:
            self._holding = self._loop.call_later(_HOLD_AFTER_S, self._hold_idle)

    def _hold_idle(self) -> None:
        """Stop the processes of sessions that have no call."""
        self._holding = None
        numbers = sorted(self._idle & self._cells.keys())
        self._idle.clear()
        self._held.update(numbers)
        for at in range(0, len(numbers), _NUMBERS_PER_ORDER):
            self._order("hold", numbers[at : at + _NUMBERS_PER_ORDER])

    def _resume(self, number: int) -> None:
        self._idle.discard(number)
        if number in self._held:
            self._held.discard(number)
            self._order("resume", [number])

    def bound(self, cell: Cell, memory_mb: int) -> None:
        """Set what the processes of a cell may hold together, where the kernel counts that."""
        if cell.memory_mb == memory_mb or "memory group" not in self.protections:
            return
        cell.memory_mb = memory_mb
        number = next((number for number, other in self._cells.items() if other is cell), None)
        if number is not None:
            self._order("bound", [number], memory_mb=memory_mb)

    def _order(
        self, order: str, numbers: Sequence[int], fds: Sequence[int] = (), **details: object
    ) -> None:
        if not self.is_alive:
            return
        message = json.dumps({"order": order, "numbers": numbers, **details}).encode()
        # Orders are few and tiny and the server reads them at once: waiting here, should its queue
        # ever be full, is simpler than a queue of our own and costs microseconds.
        self._control.settimeout(5.0)
        try:
            socket.send_fds(self._control, [message], list(fds))
        except OSError:
            self._lose()
        else:
            self._control.setblocking(False)

    def _on_event(self) -> None:
        for _ in range(64):
            try:
                data = self._control.recv(8192)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            try:
                self._handle(json.loads(data))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self._lose()  # not our fork server's words: it can no longer be trusted
                return

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "started":
            self.protections = tuple(event["protections"])
            self._memory_mb = int(event["memory_mb"])
            if not self._started.done():
                self._started.set_result(None)
            return
        number = event.pop("number")
        self._held.discard(number)
        cell = self._cells.pop(number, None)
        if cell is not None:
            cell.on_exit(Exit(**event))

    @property
    def num_cells(self) -> int:
        """Cells that live: waiting ones and those in use."""
        return len(self._cells)

    @property
    def is_settled(self) -> bool:
        """Whether no cell is in use or on its way out."""
        return all(cell in self._warm for cell in self._cells.values())

    async def settle(self) -> None:
        """Wait until every cell that was ordered to end has ended."""
        for cell in set(self._cells.values()).difference(self._warm):
            await cell.wait_until_gone()

    def _lose(self) -> None:
        """The server died, and by the kernel's hand its cells did too."""
        if not self._started.done():
            with contextlib.suppress(OSError):  # so that it ends, if it lives
                self._control.shutdown(socket.SHUT_RDWR)
            message = f"the sandbox's fork server did not start: {self.server.complaint()}"
            self._started.set_exception(SandboxError(message))
        self.close()

    def close(self) -> None:
        """End the server and all cells, at once. Idempotent."""
        if not self.is_alive or os.getpid() != self._owner:
            return
        self.is_alive = False
        if self._holding is not None:
            self._holding.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        # It ends its cells and cleans up when the socket closes, also one that a fork holds open.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        cells, self._cells = self._cells, {}
        for cell in cells.values():
            cell.on_exit(Exit(-1))
            cell.close()
        self._warm.clear()
        self.server.end()
