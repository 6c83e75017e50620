"""One call of a cell, and its result."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import signal
import sys
import termios
from typing import NamedTuple

from areal_gym.sandbox import messages
from areal_gym.sandbox.base import SandboxLimits, SandboxResult, SandboxStatus

FLOOD_BYTES = 16 << 20
"""Bytes beyond its limit that a snippet may write, and that are dropped, before it is ended."""
_CHUNK_BYTES = 32 * 1024
_READ_BYTES = 64 * 1024


class Exit(NamedTuple):
    """The end of a cell's process, as the fork server reports it."""

    status: int
    """The status of waitpid(2); -1 when the fork server was lost or could not fork."""
    cpu_s: float = 0.0
    peak_kb: int = 0
    is_starved: bool = False
    """Its processes used too much memory together."""
    is_crowded: bool = False
    """It had too many threads and processes, on systems where the kernel does not limit them."""
    is_overfull: bool = False
    """Its files used too much disk space together."""
    error: str = ""


class Capture:
    """Keeps the first bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()
        self.num_lost = 0

    def read(self, fd: int) -> int:
        """Read a chunk and return its size; 0 at the end or when the pipe is empty."""
        try:
            data = os.read(fd, _READ_BYTES)
        except OSError:
            return 0
        kept = data[: self._limit - len(self._data)]
        self._data += kept
        self.num_lost += len(data) - len(kept)
        return len(data)

    def drain(self, fd: int) -> None:
        """Read what the pipe holds now, and no more: a busy writer must not block the loop."""
        count = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
        left = int.from_bytes(count, sys.byteorder)
        while left > 0 and (size := self.read(fd)):
            left -= size

    def text(self) -> str:
        """Return the kept text."""
        return self._data.decode("utf-8", "replace")


class Call:
    """One snippet that is being executed."""

    def __init__(
        self, limits: SandboxLimits, is_fresh: bool, finished: asyncio.Future[None]
    ) -> None:
        self.limits = limits
        self.is_fresh = is_fresh
        self.finished = finished
        self.nonce = secrets.token_hex(8)
        self.captures = (Capture(limits.output_bytes), Capture(limits.output_bytes))
        self.answer: messages.CellMessage | None = None
        self.has_begun = False
        self.stopped: SandboxStatus | None = None
        self.giving_up: asyncio.TimerHandle | None = None
        self._messages_left = messages.MESSAGES_PER_CALL
        self._bytes_left = messages.BYTES_PER_CALL

    def admits(self, size: int) -> bool:
        """Count a message of `size` bytes, and return whether the protocol's bounds allow it."""
        self._messages_left -= 1
        self._bytes_left -= size
        return self._messages_left >= 0 and self._bytes_left >= 0

    def finish(self) -> None:
        """Wake the caller. Idempotent."""
        if not self.finished.done():
            self.finished.set_result(None)

    def result(self, exit: Exit | None, elapsed_s: float) -> SandboxResult:
        """Make the result for the caller; `exit` is None while a session continues."""
        status, reason = self._status(exit)
        stdout, stderr = (capture.text() for capture in self.captures)
        answer = self.answer
        explanation = (answer.traceback if answer else "") or reason
        if explanation and stderr and not stderr.endswith("\n"):
            stderr += "\n"
        return SandboxResult(
            status=status,
            stdout=stdout,
            stderr=stderr + explanation,
            value=answer.value if answer and status is SandboxStatus.OK else None,
            elapsed_s=elapsed_s,
            peak_memory_mb=self._peak_kb(exit) / 1024,
        )

    def _peak_kb(self, exit: Exit | None) -> int:
        if exit is not None:
            return exit.peak_kb
        return self.answer.peak_kb if self.answer else 0

    def _status(self, exit: Exit | None) -> tuple[SandboxStatus, str]:
        limits = self.limits
        overflow = f"OutputLimit: more than {limits.output_bytes} bytes were printed\n"
        if self.stopped is SandboxStatus.TIMEOUT:
            return SandboxStatus.TIMEOUT, f"TimeoutError: no result after {limits.wall_s:g} s\n"
        if self.stopped is SandboxStatus.OUTPUT:
            return SandboxStatus.OUTPUT, overflow
        if self.stopped is SandboxStatus.KILLED:
            return SandboxStatus.KILLED, "Killed: it flooded the sandbox's own channel\n"
        if exit is not None and exit.is_starved:
            text = f"MemoryError: its processes held more than {limits.memory_mb} MB together\n"
            return SandboxStatus.MEMORY, text
        if exit is not None and exit.is_crowded:
            text = f"Killed: more than {limits.num_processes} threads and processes\n"
            return SandboxStatus.KILLED, text
        if exit is not None and exit.is_overfull:
            return SandboxStatus.KILLED, "Killed: its files held too much of the disk together\n"
        if exit is not None and exit.status < 0:
            return SandboxStatus.KILLED, "Killed: the interpreter was lost\n"
        code = 0 if exit is None else os.waitstatus_to_exitcode(exit.status)
        if exit is not None and code < 0:
            # On a busy machine the kernel's limit, in ticks, triggers before its accounting does.
            if exit.cpu_s >= 0.5 * limits.cpu_s and -code in (signal.SIGKILL, signal.SIGXCPU):
                text = f"TimeoutError: more than {limits.cpu_s:g} s of processor time\n"
                return SandboxStatus.TIMEOUT, text
            return SandboxStatus.KILLED, f"Killed: {_signal_name(-code)}\n"
        if self.answer and self.answer.status == "memory":
            return SandboxStatus.MEMORY, ""
        if self.answer and self.answer.status == "error":
            return SandboxStatus.ERROR, ""
        if code != 0:
            return SandboxStatus.ERROR, f"SystemExit: {code}\n"
        if any(capture.num_lost for capture in self.captures):
            return SandboxStatus.OUTPUT, overflow
        return SandboxStatus.OK, ""


def request(code: str, call: Call) -> list[bytes]:
    """Return the messages that send a snippet to a cell."""
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
    return [message[start : start + _CHUNK_BYTES] for start in range(0, len(message), _CHUNK_BYTES)]


def _signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals only have numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
