"""The parent's end of one cell: send a snippet, collect what it writes, read how it ended.

Three descriptors lead to a cell: a message socket, its standard output and its standard error. How
the process ended does not come from the cell but from the fork server, which it cannot reach.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from areal_gym.errors import SandboxError
from areal_gym.sandbox.base import SandboxLimits, SandboxResult, SandboxStatus

__all__ = ["Cell", "Exit"]

_CHUNK_BYTES = 32 * 1024
_MESSAGE_BYTES = 128 * 1024
_READ_BYTES = 64 * 1024
_FLOOD_BYTES = 16 << 20
"""Beyond its limit, a snippet may write this much that is thrown away before it is ended."""
_START_S = 60.0


class Exit(NamedTuple):
    """How a cell's process ended, by the word of the fork server."""

    status: int
    """As of waitpid(2); -1 when the fork server was lost or could not fork."""
    cpu_s: float = 0.0
    peak_kb: int = 0
    is_starved: bool = False
    """Its processes held too much memory together."""
    error: str = ""


class Cell:
    """One forked interpreter. Made by `Zygote.spawn`; belongs to the running loop."""

    def __init__(
        self, channel: socket.socket, stdout: int, stderr: int, kill: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._outputs = (stdout, stderr)
        self._heard: set[int] = set()
        """Those of them that the loop listens to."""
        self._kill = kill
        self._ready = self._loop.create_future()
        self._exit: Exit | None = None
        self._gone = asyncio.Event()
        self._call: _Call | None = None
        self._loop.add_reader(channel, self._on_message)

    @property
    def is_alive(self) -> bool:
        """Whether it can still be given a snippet."""
        return self._exit is None

    async def execute(self, code: str, limits: SandboxLimits, *, is_fresh: bool) -> SandboxResult:
        """Execute `code`; after it, a fresh cell has ended and one of a session waits for more.

        Raises:
            SandboxError: the cell could not start, or was lost before or beside the snippet.
        """
        await self._wait_until_ready()
        call = self._call = _Call(limits, is_fresh, self._loop.create_future())
        for fd in self._outputs:
            if fd not in self._heard:
                self._heard.add(fd)
                self._loop.add_reader(fd, self._on_output, fd)
        started = time.monotonic()
        deadline = self._loop.call_later(limits.wall_s, self._stop, SandboxStatus.TIMEOUT)
        try:
            if self._exit is not None:
                call.finish()
            await self._send(code, call)
            await call.finished
        except BaseException:
            self.kill()
            raise
        finally:
            deadline.cancel()
            self._call = None
            if self._channel.fileno() >= 0:
                for fd, capture in zip(self._outputs, call.captures, strict=True):
                    capture.drain(fd)
        elapsed_s = time.monotonic() - started
        if self._exit is not None:
            self.close()
            is_lost = self._exit.status < 0 and is_fresh
            if call.stopped is None and (is_lost or not call.has_begun):
                raise SandboxError("a sandbox process was lost through no fault of its snippet")
        return call.result(self._exit, elapsed_s)

    async def _wait_until_ready(self) -> None:
        if self._ready.done():
            self._ready.result()
            return
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            self.kill()
            raise SandboxError(f"a sandbox process did not start within {_START_S:g} s") from None
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _send(self, code: str, call: _Call) -> None:
        source = code.encode("utf-8", "surrogatepass")
        limits = call.limits
        header = {
            "nonce": call.nonce,
            "size": len(source),
            "is_fresh": call.is_fresh,
            "limits": {
                "cpu_s": limits.cpu_s,
                "memory_mb": limits.memory_mb,
                "file_mb": limits.file_mb,
                "num_processes": limits.num_processes,
            },
        }
        message = json.dumps(header).encode() + b"\n" + source
        try:
            for start in range(0, len(message), _CHUNK_BYTES):
                chunk = message[start : start + _CHUNK_BYTES]
                await self._loop.sock_sendall(self._channel, chunk)
        except OSError:
            return  # it died meanwhile; the fork server will say how

    def _on_message(self) -> None:
        for _ in range(16):
            try:
                data = self._channel.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._channel)
                return
            self._take_message(data)

    def _take_message(self, data: bytes) -> None:
        try:
            message = json.loads(data)
        except ValueError:
            return  # written by the snippet
        if not isinstance(message, dict):
            return
        if message.get("ready") and not self._ready.done():
            self._ready.set_result(None)
        elif self._call is None or message.get("nonce") != self._call.nonce:
            return
        elif message.get("status") == "begun":
            self._call.has_begun = True
        else:
            self._call.message = message
            if not self._call.is_fresh:
                self._call.finish()

    def _on_output(self, fd: int) -> None:
        capture = None if self._call is None else self._call.captures[fd == self._outputs[1]]
        if capture is None or not capture.read(fd):
            # Its end; or a thread that a session left behind, which the next call will hear.
            self._heard.discard(fd)
            self._loop.remove_reader(fd)
        elif capture.num_lost > _FLOOD_BYTES:
            self._stop(SandboxStatus.OUTPUT)

    def _stop(self, why: SandboxStatus) -> None:
        if self._call is not None and self._call.stopped is None:
            self._call.stopped = why
            self.kill()

    def on_exit(self, exit: Exit) -> None:
        """Told by the fork server: the process and all that it started are gone."""
        self._exit = exit
        self._gone.set()
        if not self._ready.done():
            capture = _Capture(4096)
            capture.drain(self._outputs[1])
            reason = exit.error or capture.text() or f"wait status {exit.status}"
            self._ready.set_exception(SandboxError(f"a sandbox process did not start: {reason}"))
            self._ready.exception()  # an idle cell has nobody who waits for it
        if self._call is not None:
            while self._channel in self._readable():
                self._on_message()
            self._call.finish()
        else:
            self.close()

    def _readable(self) -> tuple[socket.socket, ...]:
        """The channel while messages are left in it."""
        try:
            data = self._channel.recv(1, socket.MSG_PEEK)
        except OSError:
            return ()
        return (self._channel,) if data else ()

    def kill(self) -> None:
        """End the process and all that it started, without waiting for it."""
        if self._exit is None:
            self._kill()

    async def aclose(self) -> None:
        """End the process and all that it started."""
        self.kill()
        await self.wait_until_gone()
        self.close()

    async def wait_until_gone(self) -> None:
        """Wait for the end of the process and all that it started."""
        await self._gone.wait()

    def close(self) -> None:
        """Let go of the descriptors. Idempotent."""
        if self._channel.fileno() >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._channel)
                for fd in self._outputs:
                    self._loop.remove_reader(fd)
            self._channel.close()
            for fd in self._outputs:
                os.close(fd)


class _Capture:
    """The first bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()
        self.num_lost = 0

    def read(self, fd: int) -> bool:
        """Take what is there; False at the end or when nothing is left."""
        try:
            data = os.read(fd, _READ_BYTES)
        except OSError:
            return False
        kept = data[: self._limit - len(self._data)]
        self._data += kept
        self.num_lost += len(data) - len(kept)
        return bool(data)

    def drain(self, fd: int) -> None:
        """Take all that is there, up to a flood."""
        while self.num_lost <= _FLOOD_BYTES and self.read(fd):
            continue

    def text(self) -> str:
        return self._data.decode("utf-8", "replace")


class _Call:
    """One snippet on its way."""

    def __init__(
        self, limits: SandboxLimits, is_fresh: bool, finished: asyncio.Future[None]
    ) -> None:
        self.limits = limits
        self.is_fresh = is_fresh
        self.finished = finished
        self.nonce = secrets.token_hex(8)
        self.captures = (_Capture(limits.output_bytes), _Capture(limits.output_bytes))
        self.message: dict[str, Any] = {}
        self.has_begun = False
        self.stopped: SandboxStatus | None = None

    def finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def result(self, exit: Exit | None, elapsed_s: float) -> SandboxResult:
        status, reason = self._status(exit)
        stdout, stderr = (capture.text() for capture in self.captures)
        explanation = _text(self.message.get("traceback")) or reason
        if explanation and stderr and not stderr.endswith("\n"):
            stderr += "\n"
        value = self.message.get("value") if status is SandboxStatus.OK else None
        return SandboxResult(
            status=status,
            stdout=stdout,
            stderr=stderr + explanation,
            value=None if value is None else _text(value),
            elapsed_s=elapsed_s,
            peak_memory_mb=self._peak_kb(exit) / 1024,
        )

    def _peak_kb(self, exit: Exit | None) -> int:
        if exit is not None:
            return exit.peak_kb
        said = self.message.get("peak_kb")
        return said if isinstance(said, int) else 0

    def _status(self, exit: Exit | None) -> tuple[SandboxStatus, str]:
        limits = self.limits
        overflow = f"OutputLimit: more than {limits.output_bytes} bytes were printed\n"
        if self.stopped is SandboxStatus.TIMEOUT:
            return SandboxStatus.TIMEOUT, f"TimeoutError: no result after {limits.wall_s:g} s\n"
        if self.stopped is SandboxStatus.OUTPUT:
            return SandboxStatus.OUTPUT, overflow
        if exit is not None and exit.is_starved:
            text = f"MemoryError: its processes held more than {limits.memory_mb} MB together\n"
            return SandboxStatus.MEMORY, text
        if exit is not None and exit.status < 0:
            return SandboxStatus.KILLED, "Killed: the interpreter was lost\n"
        code = 0 if exit is None else os.waitstatus_to_exitcode(exit.status)
        if exit is not None and code < 0:
            # On a busy machine the kernel's limit goes by ticks and comes earlier than its account.
            if exit.cpu_s >= 0.5 * limits.cpu_s and -code in (signal.SIGKILL, signal.SIGXCPU):
                text = f"TimeoutError: more than {limits.cpu_s:g} s of processor time\n"
                return SandboxStatus.TIMEOUT, text
            return SandboxStatus.KILLED, f"Killed: {signal.Signals(-code).name}\n"
        said = self.message.get("status", "ok")
        if said == "memory":
            return SandboxStatus.MEMORY, ""
        if said != "ok":
            return SandboxStatus.ERROR, ""
        if code != 0:
            return SandboxStatus.ERROR, f"SystemExit: {code}\n"
        if any(capture.num_lost for capture in self.captures):
            return SandboxStatus.OUTPUT, overflow
        return SandboxStatus.OK, ""


def _text(value: object) -> str:
    """What a cell says is a text, as one that every encoder takes."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""
