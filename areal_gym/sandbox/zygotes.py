"""The parent's end of a fork server: start it, order cells, hear of their ends."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from areal_gym.errors import SandboxError
from areal_gym.sandbox.cells import Cell, Exit

__all__ = ["Zygote"]

_START_S = 60.0
_BOOT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from worker import zygote
del sys.path[0]
zygote.main(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
"""


class Zygote:
    """One fork server and the cells that it has forked. Belongs to the running loop.

    It is a fresh interpreter, not a fork of this process: nothing that this process knows, holds
    open or has in its environment is in it.
    """

    def __init__(self, *, modules: Sequence[str], without: Collection[str], num_warm: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = os.getpid()
        self._num_warm = num_warm
        self._warm: deque[Cell] = deque()
        self._cells: dict[int, Cell] = {}
        self._last_number = 0
        self._started = self._loop.create_future()
        self._scratch = ""
        paths = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
        settings = {
            "modules": list(modules),
            "without": list(without),
            "paths": [os.path.abspath(path) for path in paths if os.path.isdir(path)],
        }
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        parent = os.pidfd_open(os.getpid())
        fds = (theirs.fileno(), parent)
        command = [sys.executable, "-P", "-s", "-S", "-X", "utf8", "-c", _BOOT]
        command += [str(Path(__file__).parent), *map(str, fds), json.dumps(settings)]
        self._process = subprocess.Popen(
            command,
            # Sets of strings have one order in every interpreter, so that episodes repeat. One
            # thread: a process with more cannot be forked safely.
            env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            cwd="/",
        )
        theirs.close()
        os.close(parent)
        self.protections: tuple[str, ...] = ()
        self.is_alive = True
        self._loop.add_reader(self._control, self._on_event)

    @classmethod
    async def start(
        cls, *, modules: Sequence[str], without: Collection[str], num_warm: int
    ) -> Self:
        """Start a fork server and its first `num_warm` waiting cells.

        Raises:
            SandboxError: it did not start.
        """
        zygote = cls(modules=modules, without=without, num_warm=num_warm)
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

    def take(self) -> Cell:
        """A cell that nobody has used: a waiting one, or a new one."""
        while self._warm:
            cell = self._warm.popleft()
            if cell.is_alive:
                return cell
        return self.spawn()

    def refill(self) -> None:
        """Fork new cells until enough wait."""
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
        cell = Cell(channel, stdout, stderr, partial(self._order, "kill", number))
        self._cells[number] = cell
        self._order("spawn", number, (theirs.fileno(), their_stdout, their_stderr))
        theirs.close()
        os.close(their_stdout)
        os.close(their_stderr)
        return cell

    def _order(self, order: str, number: int, fds: Sequence[int] = ()) -> None:
        message = json.dumps({"order": order, "number": number}).encode()
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
            self._handle(json.loads(data))

    def _handle(self, event: dict[str, Any]) -> None:
        if event["event"] == "started":
            self.protections = tuple(event["protections"])
            self._scratch = event["scratch"]
            if not self._started.done():
                self._started.set_result(None)
            return
        cell = self._cells.pop(event["number"], None)
        if cell is not None:
            cell.on_exit(Exit(event["status"], event["cpu_s"], event.get("error", "")))

    def _lose(self) -> None:
        """The server died, and by the kernel's hand its cells did too."""
        if not self._started.done():
            # It is gone or going, so this read ends.
            stderr = self._process.stderr
            reason = stderr.read().decode(errors="replace").strip() if stderr is not None else ""
            message = f"the sandbox's fork server did not start: {reason}"
            self._started.set_exception(SandboxError(message))
        self.close()

    def close(self) -> None:
        """End the server and all cells, at once. Idempotent."""
        if not self.is_alive or os.getpid() != self._owner:
            return
        self.is_alive = False
        if not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        # It ends its cells and cleans up when the socket closes.
        self._control.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        cells, self._cells = self._cells, {}
        for cell in cells.values():
            cell.on_exit(Exit(-1, 0.0))
            cell.close()
        self._warm.clear()
        if self._process.stderr is not None:
            self._process.stderr.close()
        if self._scratch:
            # Only a server that was killed leaves it.
            shutil.rmtree(self._scratch, ignore_errors=True)
