"""One call of a cell: its request, what the cell answers, and its result.

A cell's message is one line of ASCII; an answer has a text after it:

    ready
    NONCE begun
    NONCE STATUS PEAK_KB value|traceback|nothing
    TEXT

It is flat, so that nothing can nest, and its numbers have at most twelve digits. Messages are
untrusted: the constants limit their length and their number per call.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import secrets
import signal
import sys
import termios
from typing import NamedTuple

from areal_gym.sandbox.base import SandboxLimits, SandboxResult, SandboxStatus

READY = b"ready"
MESSAGE_BYTES = 128 * 1024
"""Longer messages are cut, which only shortens their text."""
MESSAGES_PER_CALL = 1024
"""An honest call sends two messages. The cell is ended after this many, invalid ones included."""
_BYTES_PER_CALL = 8 << 20  # of all messages together; beyond it the cell is ended
FLOOD_BYTES = 16 << 20
"""Bytes beyond its limit that a snippet may write, and that are dropped, before it is ended."""
_CHUNK_BYTES = 32 * 1024
_READ_BYTES = 64 * 1024

_MAX_HEAD_BYTES = 64
_HEAD = re.compile(
    rb"([0-9a-f]{16}) (?:(begun)|(ok|error|memory) ([0-9]{1,12}) (value|traceback|nothing))"
)


class CellMessage(NamedTuple):
    """A well-formed message about the call `nonce`; it may still be forged."""

    nonce: str
    status: str  # "begun", or "ok", "error" or "memory" in an answer
    peak_kb: int = 0
    value: str | None = None
    traceback: str = ""


def parse_cell_message(data: bytes) -> CellMessage | None:
    """Return the message in `data`, or None if it is not valid; never raises."""
    end = data.find(b"\n", 0, _MAX_HEAD_BYTES + 1)
    head = data[: end if end >= 0 else _MAX_HEAD_BYTES + 1]
    match = _HEAD.fullmatch(head)
    if match is None:
        return None
    nonce, begun, status, peak_kb, kind = match.groups()
    if begun:
        return CellMessage(nonce.decode(), "begun")
    text = data[end + 1 :].decode("utf-8", "replace") if end >= 0 else ""
    return CellMessage(
        nonce.decode(),
        status.decode(),
        int(peak_kb),
        value=text if kind == b"value" else None,
        traceback=text if kind == b"traceback" else "",
    )


class Exit(NamedTuple):
    """The end of a cell's process, as the fork server reports it."""

    status: int  # of waitpid(2); -1 when the fork server was lost or could not fork
    cpu_s: float = 0.0
    peak_kb: int = 0
    excess: str = ""  # what all its processes together used too much of: a key of `_EXCESSES`
    error: str = ""


_EXCESSES = {
    "memory": "MemoryError: its processes held more than {limits.memory_mb} MB together\n",
    "processes": "Killed: more than {limits.num_processes} threads and processes\n",
    "files": "Killed: its files held too much of the disk together\n",
}
_OVERFLOW = "OutputLimit: more than {limits.output_bytes} bytes were printed\n"
_STOPPED = {
    SandboxStatus.TIMEOUT: "TimeoutError: no result after {limits.wall_s:g} s\n",
    SandboxStatus.OUTPUT: _OVERFLOW,
    SandboxStatus.KILLED: "Killed: it flooded the sandbox's own channel\n",
}


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

    def __init__(self, limits: SandboxLimits, is_fresh: bool) -> None:
        self.limits = limits
        self.is_fresh = is_fresh
        self.finished = asyncio.Event()
        self.nonce = secrets.token_hex(8)
        self.captures = (Capture(limits.output_bytes), Capture(limits.output_bytes))
        self.answer: CellMessage | None = None
        self.has_begun = False
        self.stopped: SandboxStatus | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.giving_up: asyncio.TimerHandle | None = None
        self._messages_left = MESSAGES_PER_CALL
        self._bytes_left = _BYTES_PER_CALL

    def request(self, code: str) -> list[bytes]:
        """Return the messages that send a snippet to a cell."""
        source = code.encode("utf-8", "surrogatepass")
        names = ("cpu_s", "memory_mb", "file_mb", "num_processes")
        header = {
            "nonce": self.nonce,
            "size": len(source),
            "is_fresh": self.is_fresh,
            "limits": {name: getattr(self.limits, name) for name in names},
        }
        data = json.dumps(header).encode() + b"\n" + source
        return [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]

    def admits(self, size: int) -> bool:
        """Count a message of `size` bytes, and return whether the protocol's bounds allow it."""
        self._messages_left -= 1
        self._bytes_left -= size
        return self._messages_left >= 0 and self._bytes_left >= 0

    def result(self, exit: Exit | None, elapsed_s: float) -> SandboxResult:
        """Make the result for the caller; `exit` is None while a session continues."""
        status, reason = self._status(exit)
        stdout, stderr = (capture.text() for capture in self.captures)
        answer = self.answer
        # A snippet may end by itself while it is stopped: the last line says what the status does.
        explanation = (answer.traceback if answer else "") + reason.format(limits=self.limits)
        if explanation and stderr and not stderr.endswith("\n"):
            stderr += "\n"
        measured = exit or answer
        return SandboxResult(
            status=status,
            stdout=stdout,
            stderr=stderr + explanation,
            value=answer.value if answer and status is SandboxStatus.OK else None,
            elapsed_s=elapsed_s,
            peak_memory_mb=measured.peak_kb / 1024 if measured else 0.0,
        )

    def _status(self, exit: Exit | None) -> tuple[SandboxStatus, str]:
        if self.stopped is not None:
            return self.stopped, _STOPPED[self.stopped]
        if exit is not None and exit.excess:
            is_memory = exit.excess == "memory"
            status = SandboxStatus.MEMORY if is_memory else SandboxStatus.KILLED
            return status, _EXCESSES[exit.excess]
        if exit is not None and exit.status < 0:
            return SandboxStatus.KILLED, "Killed: the interpreter was lost\n"
        code = 0 if exit is None else os.waitstatus_to_exitcode(exit.status)
        if exit is not None and code < 0:
            # On a busy machine the kernel's limit, in ticks, triggers before its accounting does.
            is_used_up = exit.cpu_s >= 0.5 * self.limits.cpu_s
            if is_used_up and -code in (signal.SIGKILL, signal.SIGXCPU):
                text = "TimeoutError: more than {limits.cpu_s:g} s of processor time\n"
                return SandboxStatus.TIMEOUT, text
            # Real-time signals only have numbers.
            name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
            return SandboxStatus.KILLED, f"Killed: {name}\n"
        if self.answer and self.answer.status != "ok":
            return SandboxStatus(self.answer.status), ""
        if code != 0:
            return SandboxStatus.ERROR, f"SystemExit: {code}\n"
        if any(capture.num_lost for capture in self.captures):
            return SandboxStatus.OUTPUT, _OVERFLOW
        return SandboxStatus.OK, ""
